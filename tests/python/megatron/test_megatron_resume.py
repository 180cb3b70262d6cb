"""Checkpoints of Megatron's training loop: step counts without Transformer Engine, and the attention of a model."""

import argparse
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.launch import megatron_losses, run_worker
from support.megatron_loop import ACCEPTED, MEGATRON, PRETRAIN, needs_training, train
from support.messages import mentions

from megatron_sb.megatron import (
    StickBreakingCoreAttention,
    StickBreakingOptions,
    add_arguments,
    saved_attention,
    settings,
)
from megatron_sb.megatron.saved_attention import check_checkpoint, compare_when_loading
from megatron_sb.megatron.settings import MARKER
from megatron_sb.megatron.weights import write_attention_kind, write_weights

CHECKPOINT = Path("run/iter_0000100")


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_checkpoints.py", 2, tmp_path_factory.mktemp("checkpoints") / "findings.json")


@pytest.mark.parametrize("buckets", ["one bucket", "several buckets"])
@pytest.mark.parametrize("kind", ["fully_reshardable", "dp_reshardable"])
def test_distributed_optimizer_resumes(findings, kind, buckets):
    """An interrupted training ends with the parameters and step counts of one in a piece."""
    found = findings["resumed"][f"{kind}, {buckets}"]
    assert any(found["padding"][:-1]) == (buckets == "several buckets")  # parameters follow the padding of a bucket
    assert found["steps"] == [[3.0], [6.0]]
    assert found["difference"] == 0.0
    assert found["difference from the interrupted training"] > 1e-3


def test_reading_the_state_before_the_first_step_changes_nothing(findings):
    assert findings["before the first step"] == {"same settings": True, "gradients": 0, "difference": 0.0}


def test_strict_loading_reports_the_marker(findings):
    """Only softmax attention does not know it. A checkpoint without it loads as before."""
    messages = dict(findings["marked"])
    assert "core_attention.stick_breaking_attention" in messages.pop("marked, softmax")
    assert {*messages.values()} == {"no error"} and len(messages) == 3


def arguments(**changes) -> Namespace:
    """Return the arguments of a script with the flag and the defaults of the other flags."""
    return Namespace(
        **{
            "stick_breaking_attention": True,
            "sb_attend_current": False,
            "sb_mass_threshold": 2**-24,
            "sb_remainder_bias": False,
            "sb_head_norm": False,
            "sb_logits": "dot",
            "sb_reach": None,
            "sb_forget_gate": False,
            "sb_forget_gate_loss": 0.0,
            "sb_cp_layout": "zigzag",
            "sb_packing": "per_document",
            "sb_layers": None,
            "sb_allow_mismatch": False,
            "spec": None,
            **changes,
        }
    )


SOFTMAX = Namespace(num_layers=2)  # of a script without this package, or under the launcher without the flag
ANOTHER = {
    "softmax now": (arguments(), SOFTMAX, "args.stick_breaking_attention True False pass --stick-breaking-attention"),
    "softmax before": (SOFTMAX, arguments(), "args.stick_breaking_attention False True remove"),
    "own key": (arguments(sb_attend_current=True), arguments(), "args.sb_attend_current True False"),
    "no bias": (arguments(), arguments(sb_remainder_bias=True), "args.sb_remainder_bias remove --sb-remainder-bias"),
    "norm": (arguments(sb_head_norm=True), arguments(), "args.sb_head_norm True False pass --sb-head-norm"),
    "logits": (arguments(sb_logits="euclidean"), arguments(), "args.sb_logits 'euclidean' 'dot' --sb-logits"),
    "reach": (
        arguments(sb_reach=[0.5, 10.0]),
        arguments(),
        "args.sb_reach (0.5, 10.0) None pass --sb-reach 0.5 10.0,",
    ),
    "gates": (arguments(sb_forget_gate=True), arguments(), "args.sb_forget_gate True False pass --sb-forget-gate"),
    "layers": (
        arguments(sb_layers=(1, 0)),
        arguments(),
        "args.sb_layers (1, 0) None pass --sb-layers [1,0]",
    ),
}


@pytest.mark.parametrize(("saved", "now", "words"), ANOTHER.values(), ids=ANOTHER)
def test_checkpoints_of_another_attention(saved, now, words):
    with pytest.raises(ValueError, match=mentions(f"{words} {CHECKPOINT} --sb-allow-mismatch")):
        check_checkpoint(saved, CHECKPOINT, now)
    check_checkpoint(saved, CHECKPOINT, Namespace(**{**vars(now), "sb_allow_mismatch": True}))


SAME = {
    "softmax": (SOFTMAX, SOFTMAX),
    "softmax of a plain script": (SOFTMAX, arguments(stick_breaking_attention=False)),
    "what the data loader and the optimizer use": (
        arguments(),
        arguments(sb_cp_layout="contiguous", sb_packing="whole_stream", sb_forget_gate_loss=0.1, sb_mass_threshold=0.0),
    ),
    "a reach that changes nothing": (arguments(sb_reach=[1.0, 1.0]), arguments()),
    "a reach that changed nothing": (arguments(), arguments(sb_reach=(1, 1))),
    "all layers": (arguments(sb_layers=(1, 1)), arguments()),
    "a layer spec by name": (Namespace(spec=[saved_attention.SPEC_MODULE, "stickbreaking_layer_spec"]), arguments()),
    "a release without a record, in a script without flags": (SOFTMAX, Namespace(stick_breaking_attention=True)),
}


@pytest.mark.parametrize(("saved", "now"), SAME.values(), ids=SAME)
def test_checkpoints_of_the_same_attention(saved, now):
    check_checkpoint(saved, CHECKPOINT, now)


@pytest.mark.parametrize("kind", ["stick_breaking", "mixed"])
def test_converted_checkpoints(kind, tmp_path):
    """They contain no arguments, but the kind of attention. Mixed layers are those of the trainer."""
    check_checkpoint(None, tmp_path, SOFTMAX)
    write_attention_kind(tmp_path, kind)
    check_checkpoint(None, tmp_path, arguments(sb_attend_current=True))
    with pytest.raises(ValueError, match=mentions("args.stick_breaking_attention True False")):
        check_checkpoint(None, tmp_path, SOFTMAX)


def test_names_of_layers_in_distributed_checkpoints(tmp_path):
    """Mixed GPT models need the weights of each layer. Hybrid models of Megatron also find stacked weights."""
    write_weights(tmp_path, {"decoder.layers.mlp.router.weight": torch.ones(2, 8)}, num_layers=2, num_experts=None)
    mixed = arguments(sb_layers=(1, 0))
    with pytest.raises(ValueError, match=mentions("args.sb_layers None (1, 0)")):
        saved_attention._check_layer_names(arguments(), tmp_path, mixed)
    saved_attention._check_layer_names(arguments(sb_layers=(0, 1)), tmp_path, mixed)
    mixed.hybrid_layer_pattern = "*-*-"
    saved_attention._check_layer_names(arguments(), tmp_path, mixed)


@pytest.fixture
def megatron_training(monkeypatch) -> SimpleNamespace:
    """Megatron's modules of arguments and checkpoints, with the functions that this package replaces."""
    script, saved = arguments(), arguments(sb_head_norm=True)
    names, checkpointing = ModuleType("global_vars"), ModuleType("checkpointing")
    names._GLOBAL_ARGS = script
    content = {}
    state = {"args": saved, "content_metadata": content}
    checkpointing._load_base_checkpoint = lambda folder, args, rank0=False: (state, folder, False, None)
    checkpointing._build_sharded_state_dict_metadata = lambda args, dp_cp_group=None: {"own": 1}
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", names)
    monkeypatch.setitem(sys.modules, saved_attention.CHECKPOINTING, checkpointing)
    return SimpleNamespace(script=script, saved=saved, content_metadata=content, checkpointing=checkpointing)


def test_loading_compares_and_saving_marks(megatron_training):
    for _ in range(2):
        compare_when_loading()
    checkpointing, script = megatron_training.checkpointing, megatron_training.script
    with pytest.raises(ValueError, match=mentions("args.sb_head_norm run True False")):
        checkpointing._load_base_checkpoint("run", script, rank0=True)
    parsing = arguments()  # --use-checkpoint-args: not yet the arguments of the script
    assert checkpointing._load_base_checkpoint("run", parsing)[1] == "run"
    assert checkpointing._build_sharded_state_dict_metadata(script) == {"own": 1, MARKER: True}
    script.stick_breaking_attention = False
    assert checkpointing._build_sharded_state_dict_metadata(script, dp_cp_group=None) == {"own": 1}


def test_local_checkpoints_are_compared(megatron_training):
    """A manager of local checkpoints returns an identifier: the step, the rank and the job."""
    script, checkpointing = megatron_training.script, megatron_training.checkpointing
    script.non_persistent_local_ckpt_dir, loaded = "local", ({"args": arguments()}, (2, 0, "job"), False, "LOCAL")
    checkpointing._load_base_checkpoint = lambda *args, **kwargs: loaded
    compare_when_loading()
    assert checkpointing._load_base_checkpoint(None, script, rank0=True) == loaded
    script.sb_head_norm = True
    with pytest.raises(ValueError, match=mentions("args.sb_head_norm local False True")):
        checkpointing._load_base_checkpoint(None, script, rank0=True)


def test_another_release_of_megatron(megatron_training):
    """Its module of checkpoints has other functions: a warning, and the script runs."""
    del megatron_training.checkpointing._build_sharded_state_dict_metadata
    with pytest.warns(UserWarning, match="is not compared: megatron.training.checkpointing of this release .* has no"):
        compare_when_loading()
    assert megatron_training.checkpointing._load_base_checkpoint("run", megatron_training.script)[1] == "run"


def test_layers_record_their_options(megatron_training):
    """A script that passes options to `with_stickbreaking` needs no flags for the comparison."""
    from megatron.core.transformer.enums import AttnMaskType
    from support.megatron_cpu import small_config

    for name in ("stick_breaking_attention", "sb_head_norm", "sb_logits"):
        delattr(megatron_training.script, name)
    options = StickBreakingOptions(logits="euclidean")
    groups = SimpleNamespace(tp=None, cp=None)
    StickBreakingCoreAttention(small_config(), 1, AttnMaskType.causal, "self", pg_collection=groups, options=options)
    assert settings.script_arguments().sb_logits == "euclidean"
    with pytest.raises(ValueError, match=mentions("args.sb_head_norm True False")):
        megatron_training.checkpointing._load_base_checkpoint("run", megatron_training.script)


def test_a_rank_without_stick_breaking_layers_saves_the_same_arguments(megatron_training):
    """Its layers record nothing, so those of other ranks must not change what the parser has made of the flags."""
    flags = "--stick-breaking-attention --sb-reach 0.5 10 --sb-layers [0,1]"
    args = add_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS = args
    before = dict(vars(args))
    saved_attention.record_options(StickBreakingOptions(reach=(0.5, 10.0), layers=(0, 1)))
    assert vars(args) == before
    saved_attention.record_options(StickBreakingOptions(reach=(0.5, 8.0), layers=(0, 1)))
    assert args.sb_reach == (0.5, 8.0)


def test_a_spec_records_its_options(megatron_training):
    """A pipeline stage can have no stick-breaking layer, such as a stage of Mamba layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_sb.megatron import with_stickbreaking

    megatron_training.script.stick_breaking_attention = False
    with_stickbreaking(get_gpt_layer_local_spec(), layers=(0, 1))
    assert megatron_training.script.stick_breaking_attention is True
    assert megatron_training.script.sb_layers == (0, 1)


def test_checkpoints_of_mixed_models_say_how_layers_are_named(megatron_training):
    compare_when_loading()
    megatron_training.script.sb_layers = (1, 0)
    metadata = megatron_training.checkpointing._build_sharded_state_dict_metadata(megatron_training.script)
    assert metadata == {"own": 1, MARKER: True, "non_homogeneous_layers": True}

    # A checkpoint of an older release does not say it.
    megatron_training.script.sb_allow_mismatch, megatron_training.saved.sb_layers = True, (0, 1)
    megatron_training.content_metadata[MARKER] = True
    megatron_training.checkpointing._load_base_checkpoint("run", megatron_training.script)
    assert megatron_training.content_metadata == {"non_homogeneous_layers": True}


def test_a_softmax_script_under_the_launcher(tmp_path):
    """Its Megatron is changed when it imports the module of checkpoints, unless the user allows a mismatch."""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package / "global_vars.py").write_text("_GLOBAL_ARGS = None\n")
    (package / "checkpointing.py").write_text(
        "_load_base_checkpoint = lambda *args: None\n_build_sharded_state_dict_metadata = lambda args: {}\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, types\n"
        "sys.modules['megatron'] = types.ModuleType('megatron')\n"
        f"sys.modules['megatron'].__path__ = [{str(tmp_path / 'megatron')!r}]\n"
        "from megatron.training import checkpointing\n"
        "found = hasattr(checkpointing._load_base_checkpoint, 'compares_attention')\n"
        "print(json.dumps([found, sys.argv[1:]]))\n"
    )
    found = []
    for flags in ([], ["--sb-allow-mismatch", "--lr", "1"]):
        command = [sys.executable, "-m", "megatron_sb.megatron.launch", str(script), *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found == [[True, []], [False, ["--lr", "1"]]]


def test_a_script_with_layers_of_this_package_under_the_launcher(tmp_path):
    """They compare the attention of checkpoints without the launcher, which takes the flag from the command line."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from argparse import Namespace\n"
        "from megatron_sb.megatron.saved_attention import check_checkpoint\n"
        "saved = Namespace(stick_breaking_attention=True, sb_head_norm=True)\n"
        "check_checkpoint(saved, 'run', Namespace(stick_breaking_attention=True, sb_allow_mismatch=False))\n"
        "print(sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "megatron_sb.megatron.launch", str(script), "--lr", "1"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "args.sb_head_norm (--sb-head-norm) must be True" in refused.stderr
    allowed = subprocess.run([*command, "--sb-allow-mismatch"], capture_output=True, text=True, timeout=120)
    assert allowed.stdout == "['--lr', '1']\n", allowed.stderr


OPTIMIZER = "--use-distributed-optimizer --train-iters 4 --rerun-mode disabled"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of Megatron's loop after 2 of 4 steps, with --sb-attend-current."""
    folder = tmp_path_factory.mktemp("run")
    save = f"{OPTIMIZER} --save {folder} --save-interval 2 --exit-interval 2 --sb-attend-current"
    assert len(train("cpu", 1, folder, *save.split())) == 2
    return folder


@needs_training
def test_megatrons_loop_resumes(checkpoint, tmp_path):
    """Strict loading finds the marker. The losses are those of a run in a piece.

    After a resume, the second loss that Megatron logs is the mean of both.
    """
    flags = [*OPTIMIZER.split(), "--sb-attend-current"]
    whole = train("cpu", 1, tmp_path, *flags)
    resumed = train("cpu", 1, tmp_path, *flags, "--load", str(checkpoint), "--dist-ckpt-strictness", "raise_all")
    assert len(whole) == 4 and len(resumed) == 2
    assert resumed == pytest.approx([whole[2], (whole[2] + whole[3]) / 2], abs=2e-6)


@needs_training
def test_megatrons_loop_compares(checkpoint, tmp_path):
    load = [*OPTIMIZER.split(), "--load", str(checkpoint)]
    with pytest.raises(AssertionError, match=mentions("args.sb_attend_current True False --sb-allow-mismatch")):
        train("cpu", 1, tmp_path, *load)
    assert len(train("cpu", 1, tmp_path, *load, "--sb-allow-mismatch")) == 2


@pytest.fixture(scope="module")
def mixed_checkpoint(tmp_path_factory) -> Path:
    """A checkpoint of two pipeline stages. The first one has only softmax layers."""
    folder = tmp_path_factory.mktemp("mixed")
    save = f"{MIXED} --sb-layers [0,0,1,1] --sb-reach 0.5 10 --pipeline-model-parallel-size 2 --save {folder}"
    train("cpu", 2, folder, *save.split(), "--save-interval", "2", "--exit-interval", "2")
    return folder


MIXED = f"{OPTIMIZER} --dist-ckpt-optim-fully-reshardable --num-layers 4 --no-masked-softmax-fusion"
WEIGHTS = "--finetune --no-load-optim --no-load-rng --sb-allow-mismatch --train-iters 2"


@needs_training
@pytest.mark.parametrize("flags", ["", "--sb-layers [1,1,0,0]"], ids=["all layers", "other layers"])
def test_mixed_checkpoints_load_into_models_with_other_layers(mixed_checkpoint, flags, tmp_path):
    """The new stick-breaking layers have no marker in the checkpoint."""
    losses = train("cpu", 1, tmp_path, *f"{MIXED} {WEIGHTS} --load {mixed_checkpoint} {flags}".split())
    fresh = train("cpu", 1, tmp_path, *f"{MIXED} --train-iters 2 {flags}".split())
    assert len(losses) == 2 and losses[0] < fresh[0] - 0.2


@needs_training
def test_stacked_checkpoints_of_mixed_models(checkpoint, tmp_path):
    """Megatron would list all names of the weights. With --dist-ckpt-strictness log_all it would load none of them."""
    load = f"{OPTIMIZER} {WEIGHTS} --load {checkpoint} --sb-layers [1,0] --no-masked-softmax-fusion"
    with pytest.raises(AssertionError, match=mentions("args.sb_layers --sb-layers None --ckpt-convert-format (1, 0)")):
        train("cpu", 1, tmp_path, *load.split())


@needs_training
def test_checkpoints_without_the_parameters_of_new_options(checkpoint, tmp_path):
    flags = f"{OPTIMIZER} --train-iters 4 --sb-attend-current --sb-head-norm --sb-allow-mismatch --load {checkpoint}"
    fresh = train("cpu", 1, tmp_path, *OPTIMIZER.split(), "--sb-attend-current", "--sb-head-norm")
    losses = train("cpu", 1, tmp_path, *flags.split(), "--dist-ckpt-strictness", "log_all", "--no-load-optim")
    assert len(losses) == 2 and losses[0] < fresh[0] - 0.2


@needs_training
def test_conversion_of_stacked_checkpoints_for_mixed_models(checkpoint, tmp_path):
    """The flags in docs/megatron.md, in two jobs."""
    lines = (Path(__file__).parents[3] / "docs/megatron.md").read_text().splitlines()
    first, second = (line for line in lines if line.startswith(("--load OLD ", "--load NEW/torch ")))
    own = f"{OPTIMIZER} --train-iters 2 --sb-attend-current --no-masked-softmax-fusion"
    convert = first.replace("OLD", str(checkpoint)).replace("NEW", str(tmp_path))
    assert train("cpu", 1, tmp_path, *own.split(), *convert.split()) == []
    mixed = [*second.replace("NEW", str(tmp_path)).split()[:-1], "[1,0]"]
    losses, fresh = (train("cpu", 1, tmp_path, *own.split(), *flags) for flags in (mixed, mixed[-2:]))
    assert len(losses) == 2 and losses[0] < fresh[0] - 0.2


@needs_training
def test_stacked_checkpoints_load_into_mixed_hybrid_models(checkpoint, tmp_path):
    """Megatron finds the weights of each layer of a hybrid model in the checkpoint of a GPT."""
    hybrid = "--spec megatron_mixers hybrid_stack_spec --hybrid-layer-pattern *-*- --sb-layers [1,0]"
    flags = f"{OPTIMIZER} {WEIGHTS} {hybrid} --sb-attend-current --no-masked-softmax-fusion"
    losses = train("cpu", 1, tmp_path, *flags.split(), "--load", str(checkpoint))
    assert len(losses) == 2 and losses[0] < train("cpu", 1, tmp_path, *flags.split())[0] - 0.05


@needs_training
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "args.stick_breaking_attention True False"),
        ("--sb-allow-mismatch --dist-ckpt-strictness raise_all", "core_attention.stick_breaking_attention"),
    ],
    ids=["launcher", "strict loading"],
)
def test_softmax_in_megatrons_loop(checkpoint, flags, words, tmp_path):
    """The launcher compares without its flag, too. Megatron's own strict loading reports the marker."""
    own = f"--log-interval 1 --eval-iters 0 --num-workers 0 --data-cache-path {tmp_path} --no-masked-softmax-fusion"
    command = f"{MEGATRON} {ACCEPTED} {OPTIMIZER} {own} --load {checkpoint} {flags}"
    with pytest.raises(AssertionError, match=mentions(words) if "args." in words else words):
        megatron_losses(PRETRAIN, 1, *command.split(), device="cpu")
