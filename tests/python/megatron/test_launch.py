"""`python -m megatron_sb.megatron.launch`: a user's unmodified script with one more flag."""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.fork_server import run_python
from support.launch import megatron_losses
from support.megatron_loop import ACCEPTED, MEGATRON, PRETRAIN, needs_training, train
from support.messages import mentions

from megatron_sb.megatron import StickBreakingOptions, launch

MEGATRON_LM = os.environ.get("MEGATRON_LM")
HEAD_VECTORS = ("--sb-remainder-bias", "--sb-head-norm")


def run_script(script: Path, *flags: str, launcher: bool = True, python: tuple = ()) -> subprocess.CompletedProcess:
    """Run a script with or without the launcher; `python`: flags of the interpreter."""
    through = ["-m", "megatron_sb.megatron.launch"] if launcher else []
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *python, *through, str(script), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def build_only(flags: str, out: Path) -> subprocess.CompletedProcess:
    """Build the model of a command line on a CPU, under the launcher, and write its layers to `out`."""
    command = ["-m", "megatron_sb.megatron.launch", PRETRAIN, *MEGATRON.split(), *flags.split()]
    return run_python([*command, "--use-cpu-initialization", "--build-only", out], seconds=120)


needs_safe_path = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11, which has -P")


@pytest.mark.parametrize("python", [(), pytest.param(("-P",), marks=needs_safe_path)], ids=["", "safe path"])
def test_without_the_flag_a_script_runs_as_under_python(python, tmp_path):
    """The script's name, file, arguments and search path are the same, and the launcher imports no Megatron."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\nfrom importlib.util import find_spec\n"
        "print(json.dumps([__name__, __file__, sys.argv, sys.path[:2], find_spec('neighbour') is not None, "
        "sys.modules['__main__'].__dict__ is globals(), any(name.startswith('megatron.') for name in sys.modules)]))\n"
    )
    (tmp_path / "neighbour.py").touch()
    done = [run_script(script, "--sb-layers", "x", launcher=launcher, python=python) for launcher in (True, False)]
    assert [run.returncode for run in done] == [0, 0], done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert json.loads(done[0].stdout)[-1] is False


@pytest.mark.parametrize("arguments", [[], ["missing.py"], ["--num-layers"]])
def test_missing_scripts(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "megatron_sb.megatron.launch", *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert f"SCRIPT.py must be an existing Python file, got {(arguments or [''])[0]!r}" in done.stderr


# As in pretrain_hybrid.py. A stand-in mixes in the layers M and G, because Mamba and gated delta nets need a GPU.
HYBRID = "--spec megatron_mixers hybrid_stack_spec --hybrid-layer-pattern M*-G*-"
# Keys and values have other numbers of channels, and the script's default of YaRN.
LATENT = "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
LATENT += "--v-head-dim 16 --qk-layernorm --normalization RMSNorm"
BUILT = {
    "without the flag": ("--no-persist-layer-norm", ["SelfAttention DotProductAttention LayerNorm"] * 2),
    "experts, with multi-token prediction": (
        f"--stick-breaking-attention {ACCEPTED} --num-experts 4 --disable-bias-linear --normalization RMSNorm "
        "--mtp-num-layers 1",
        ["CheckedSelfAttention StickBreakingCoreAttention RMSNorm"] * 3,
    ),
    "mixed, with rope": (
        "--stick-breaking-attention --sb-mass-threshold 0.25 --sb-layers [0]+[1] --attention-dropout 0 "
        "--position-embedding-type rope --no-rope-freq [0]+[1]",
        [
            "CheckedSelfAttention DotProductAttention LayerNorm",
            "CheckedSelfAttention StickBreakingCoreAttention LayerNorm",
        ],
    ),
    "latent": (
        f"--stick-breaking-attention {ACCEPTED} {LATENT}",
        ["CheckedMLASelfAttention StickBreakingCoreAttention RMSNorm"] * 2,
    ),
    "hybrid": (
        f"--stick-breaking-attention {ACCEPTED} {HYBRID}",
        ["CheckedSelfAttention StickBreakingCoreAttention LayerNorm"] * 2,
    ),
    "hybrid, mixed": (
        f"--stick-breaking-attention {ACCEPTED} {HYBRID} --sb-layers [0,1]",
        [
            "CheckedSelfAttention DotProductAttention LayerNorm",
            "CheckedSelfAttention StickBreakingCoreAttention LayerNorm",
        ],
    ),
}


@needs_training
@pytest.mark.parametrize(("flags", "layers"), BUILT.values(), ids=BUILT)
def test_models_of_a_training_script(flags, layers, tmp_path):
    """Megatron's builder makes these layers for a command line, in a script without stick-breaking."""
    out = tmp_path / "layers.json"
    done = build_only(flags, out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == [layer.split() for layer in layers]
    assert ("stick-breaking attention: StickBreakingOptions(" in done.stdout) == ("--stick-breaking" in flags)
    assert ("mass_threshold=0.25" in done.stdout) == ("0.25" in flags)


# A Llama-Nemotron model, with the fields that Megatron compares with its flags.
HETEROGENEOUS = {
    "hidden_act": "silu",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 8.0},
    "block_configs": [
        {
            "attention": {"n_heads_in_group": group, "no_op": group is None},
            "ffn": {"ffn_mult": 2.0},
        }
        for group in (2, None, 2)
    ],
}
AS_HETEROGENEOUS = (
    "--num-layers 3 --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --use-rotary-position-embeddings --use-rope-scaling --disable-bias-linear"
)


@needs_training
def test_heterogeneous_models_of_a_training_script(tmp_path):
    """--sb-layers counts the attention layers. Megatron requires RoPE, which --no-rope-freq disables in all layers."""
    (tmp_path / "blocks.json").write_text(json.dumps(HETEROGENEOUS))
    flags = f"--heterogeneous-layers-config-path {tmp_path / 'blocks.json'} {AS_HETEROGENEOUS}"
    flags += " --stick-breaking-attention --attention-dropout 0 --sb-layers [0,1] --no-rope-freq [0,0,1]"
    done = build_only(flags, tmp_path / "layers.json")
    assert done.returncode == 0, done.stderr[-3000:]
    cores = [core for _, core, _ in json.loads((tmp_path / "layers.json").read_text())]
    assert cores == ["DotProductAttention", "StickBreakingCoreAttention"]

    args, options = parse(AS_HETEROGENEOUS + " --sb-layers [0,1]")
    args.heterogeneous_layers_config_encoded_json = json.dumps(HETEROGENEOUS)  # Megatron accepts it without the path
    launch._check_layers(args, options)

    done = build_only(flags.replace("[0,1]", "[0,1,1]"), tmp_path / "no.json")
    assert done.returncode != 0
    assert re.search(mentions("--sb-layers (0, 1, 1) 2 3 (1, 3)"), done.stderr)


@needs_training
def test_a_script_that_adds_the_flags_itself(tmp_path):
    """Such a script also runs under the launcher, which adds them first."""
    script, out = tmp_path / "pretrain.py", tmp_path / "layers.json"
    own, both = "=add_own_arguments)", "=lambda parser: add_arguments(add_own_arguments(parser)))"
    text = PRETRAIN.read_text()
    assert own in text
    script.write_text("from megatron_sb.megatron import add_arguments\n" + text.replace(own, both))
    flags = f"--stick-breaking-attention --sb-head-norm {ACCEPTED} --use-cpu-initialization --build-only {out}"
    command = ["-m", "megatron_sb.megatron.launch", script, *MEGATRON.split(), *flags.split()]
    done = run_python(command, seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == [["CheckedSelfAttention", "StickBreakingCoreAttention", "LayerNorm"]] * 2


@needs_training
def test_a_spec_by_name_without_the_launcher(tmp_path):
    """Megatron's builder calls the function with its own kind of config."""
    out = tmp_path / "layers.json"
    flags = f"{ACCEPTED} --spec megatron_sb.megatron.spec stickbreaking_block_spec --num-experts 4"
    command = [PRETRAIN, *MEGATRON.split(), *flags.split(), "--disable-bias-linear", "--use-cpu-initialization"]
    done = run_python([*command, "--build-only", out], seconds=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(out.read_text()) == [["CheckedSelfAttention", "StickBreakingCoreAttention", "LayerNorm"]] * 2


@needs_training
@pytest.mark.parametrize(
    ("flags", "comm"),
    [("", "'auto'"), ("--cp-comm-type a2a", "None"), ("--cp-comm-type a2a --sb-cp-comm p2p", "'p2p'")],
)
def test_context_parallelism_chooses_its_communication_unless_the_user_does(flags, comm, tmp_path):
    done = build_only(f"--stick-breaking-attention {ACCEPTED} {flags}", tmp_path / "layers.json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"cp_comm={comm}" in done.stdout


@needs_training
def test_layers_check_what_the_command_line_does_not_determine(tmp_path):
    flags = "--stick-breaking-attention --attention-dropout 0 --position-embedding-type rope --no-rope-freq [0]+[1]"
    done = build_only(flags, tmp_path / "no.json")
    assert done.returncode != 0
    assert (
        "args.position_embedding_type (--position-embedding-type) must be 'none'" in done.stderr
        and "'rope'" in done.stderr
    )


def parse(flags: str) -> tuple[argparse.Namespace, StickBreakingOptions]:
    """Parse Megatron's and our flags as the launcher does before the script starts."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_sb.megatron import add_arguments, options_from_args

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    args = parser.parse_args([*MEGATRON.split(), *flags.split()])
    return args, StickBreakingOptions(**options_from_args(args))


@needs_training
def test_accepted_flags():
    launch.check_arguments(*parse(ACCEPTED))
    launch.check_arguments(*parse("--attention-dropout 0 --position-embedding-type rope --no-rope-freq 2"))
    launch.check_arguments(*parse(f"{ACCEPTED} --sb-layers [1,0]"))
    launch.check_arguments(*parse(f"{ACCEPTED} --sb-layers [1,0,1] --hybrid-layer-pattern M*|M*-*"))
    launch.check_arguments(*parse(f"{ACCEPTED} {LATENT}"))
    launch.check_arguments(*parse(f"{ACCEPTED} --qk-clip --log-max-attention-logit"))
    launch.check_arguments(*parse(f"{ACCEPTED} --multi-latent-attention --hybrid-layer-pattern M+M+-"))
    launch.check_arguments(*parse(f"{ACCEPTED} --multi-latent-attention --sb-layers [1,0] --cache-mla-latents"))
    rope = "--attention-dropout 0 --position-embedding-type rope --no-rope-freq 2"
    launch.check_arguments(*parse(f"{rope} --multi-latent-attention"))
    launch.check_arguments(*parse(f"{ACCEPTED} --experimental-attention-variant gated_delta_net"))
    whole = "--dataloader-inter-document-masking --context-parallel-size 2"
    launch.check_arguments(*parse(f"{ACCEPTED} {whole}"))
    launch.check_arguments(*parse(f"{ACCEPTED} {whole} --sb-packing whole_stream"))
    for flags in ON_TWO_RANKS.values():
        launch.check_arguments(*parse(f"{ACCEPTED} {SPREAD} {flags}"))


REFUSED = {
    "": "args.attention_dropout 0.1 --attention-dropout 0.0",
    "--attention-dropout 0": "args.position_embedding_type 'learned_absolute' 'none' 'rope'",
    "--attention-dropout 0 --position-embedding-type rope": "args.position_embedding_type 'rope'",
    f"{ACCEPTED} --attention-backend local": "args.attention_backend 'local' --attention-backend 'auto'",
    f"{ACCEPTED} --multi-latent-attention --cache-mla-latents": "args.cache_mla_latents True --cache-mla-latents",
    f"{ACCEPTED} --multi-latent-attention --mla-down-proj-fusion": "args.mla_down_proj_fusion --mla-down-proj-fusion",
    f"{ACCEPTED} --multi-latent-attention --qk-l2-norm": "args.qk_l2_norm True --qk-l2-norm",
    f"{ACCEPTED} --experimental-attention-variant dsa": "args.experimental_attention_variant 'dsa' 'gated_delta_net'",
    f"{ACCEPTED} --window-size 64,0": "args.window_size (64, 0) --window-size None",
    f"{ACCEPTED} --softmax-type learnable": "args.softmax_type 'learnable' --softmax-type",
    f"{ACCEPTED} --flash-decode": "args.flash_decode True --flash-decode",
    f"{ACCEPTED} --reset-attention-mask": "args.reset_attention_mask True --reset-attention-mask",
    f"{ACCEPTED} --yaml-cfg x.yaml": "args.yaml_cfg 'x.yaml' --yaml-cfg None",
    f"{ACCEPTED} --hybrid-layer-pattern MM-": "--hybrid-layer-pattern --stick-breaking-attention * + 'MM-'",
    f"{ACCEPTED} --sb-layers [0]*2": "--sb-layers (0, 0) 1 --stick-breaking-attention",
    f"{ACCEPTED} --sb-layers [1]*3": "--sb-layers 3 2 --num-layers (1, 2)",
    f"{ACCEPTED} --sb-layers [1]*3 --hybrid-layer-pattern M*M*-": "--sb-layers 3 2 --hybrid-layer-pattern (2, 4)",
    f"{ACCEPTED} --sb-layers [1,0] --mtp-num-layers 1": "1 args.mtp_num_layers --mtp-num-layers",
    f"{ACCEPTED} --dataloader-inter-document-masking --context-parallel-size 2 --sb-packing per_document": (
        "args.dataloader_inter_document_masking True --sb-packing 'whole_stream' 'per_document'"
    ),
}


@needs_training
@pytest.mark.parametrize(("flags", "words"), REFUSED.items())
def test_unsupported_flags(flags, words):
    with pytest.raises(ValueError, match=mentions(words)):
        launch.check_arguments(*parse(flags))


@needs_training
def test_fused_rope_of_latent_attention():
    """Megatron's default with RoPE. Without RoPE, Megatron sets it to False after this check."""
    rope = "--attention-dropout 0 --position-embedding-type rope --no-rope-freq 2 --multi-latent-attention"
    args, options = parse(rope)
    args.apply_rope_fusion = True
    with pytest.raises(ValueError, match=mentions("args.apply_rope_fusion True --no-rope-fusion")):
        launch.check_arguments(args, options)
    args.position_embedding_type = "none"
    launch.check_arguments(args, options)


@needs_training
def test_a_layout_that_contradicts_the_data_loader():
    """Megatron's branch `dev` has --cp-partition-mode. The releases and main do not, so the test sets its value."""
    args, options = parse(f"{ACCEPTED} --context-parallel-size 2 --sb-cp-layout zigzag")
    args.cp_partition_mode = "contiguous"
    words = "--sb-cp-layout 'contiguous' args.cp_partition_mode 'contiguous' --cp-partition-mode "
    with pytest.raises(ValueError, match=mentions(f"{words} --context-parallel-size 2 'zigzag' data loader")):
        launch.check_arguments(args, options)
    args.cp_partition_mode = "zigzag"
    launch.check_arguments(args, options)
    args.cp_partition_mode, args.context_parallel_size = "contiguous", 1
    launch.check_arguments(args, options)


UNGROUPED = "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall"
EXPERTS = f"{UNGROUPED} --moe-grouped-gemm"


@needs_training
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "flags",
    ["", EXPERTS, LATENT, f"{HYBRID} --sb-layers [1,0] --no-masked-softmax-fusion"],
    ids=["dense", "experts", "latent", "hybrid"],
)
def test_training(flags, device, tmp_path):
    """The loss drops quickly on documents that count upwards."""
    losses = train(device, 1, tmp_path, *flags.split())
    assert len(losses) == 20 and losses[-1] < losses[0] - 1.0, losses


# Megatron-LM's script for hybrid models in 0.19 and in 0.16, with its flags for a pattern.
PATTERN = "M*-M*-"
HYBRID_SCRIPTS = {
    "pretrain_hybrid.py": f"--hybrid-layer-pattern {PATTERN}",
    "pretrain_mamba.py": f"--is-hybrid-model --hybrid-override-pattern {PATTERN}",
}


@pytest.mark.skipif(MEGATRON_LM is None, reason="MEGATRON_LM does not name a checkout of Megatron-LM")
def test_megatrons_own_script_of_hybrid_models(tmp_path):
    """The unmodified script, with a stand-in for Mamba. MEGATRON_LM is of the release that is installed."""
    folder = Path(MEGATRON_LM).resolve()
    script, pattern = next((folder / name, flags) for name, flags in HYBRID_SCRIPTS.items() if (folder / name).exists())
    flags = f"{MEGATRON} {ACCEPTED} --num-layers {len(PATTERN)} {pattern} --spec workers.megatron_mixers "
    flags += "hybrid_stack_spec --stick-breaking-attention --sb-layers [0,1] --hidden-dropout 0 --num-workers 0 "
    flags += "--use-cpu-initialization --no-create-attention-mask-in-dataloader --no-masked-softmax-fusion "
    flags += "--no-bias-dropout-fusion --no-bias-gelu-fusion --log-interval 1 --eval-iters 0 --eval-interval 1000"
    losses = megatron_losses(script, 1, *flags.split(), "--data-cache-path", tmp_path, device="cpu")
    assert len(losses) == 20 and losses[-1] < losses[0] - 0.7, losses


# Layers that need no stand-in, which would mix only the tokens of its own rank.
HYBRID_OF_TWO_RANKS = "--spec megatron_mixers hybrid_stack_spec --hybrid-layer-pattern"
# Four layers, so that a virtual pipeline has a layer in each stage.
SPREAD = "--num-layers 4 --use-cpu-initialization --calculate-per-token-loss --use-distributed-optimizer"
ON_TWO_RANKS = {
    "context parallel": "--context-parallel-size 2",
    "context parallel by heads": "--context-parallel-size 2 --cp-comm-type a2a",
    "tensor and sequence parallel": "--tensor-model-parallel-size 2 --sequence-parallel",
    "head vectors, tensor parallel": "--tensor-model-parallel-size 2 --sb-remainder-bias --sb-head-norm",
    "latent, tensor and sequence parallel": f"{LATENT} --tensor-model-parallel-size 2 --sequence-parallel",
    "latent, context parallel": f"{LATENT} --context-parallel-size 2",
    "pipeline": "--pipeline-model-parallel-size 2",
    "virtual pipeline": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    "overlapped": "--overlap-grad-reduce --overlap-param-gather",
    "recomputed": "--context-parallel-size 2 --recompute-granularity selective --recompute-modules core_attn",
    "experts": f"--expert-model-parallel-size 2 {EXPERTS}",
    "hybrid, context parallel": f"{HYBRID_OF_TWO_RANKS} *-*- --context-parallel-size 2",
    "hybrid with experts": f"{HYBRID_OF_TWO_RANKS} *-*E --expert-model-parallel-size 2 {UNGROUPED}",
    "recomputed whole": "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
}


# A selection that covers every part of Megatron's loop on CPUs.
ON_CPUS = (
    "context parallel",
    "head vectors, tensor parallel",
    "latent, tensor and sequence parallel",
    "virtual pipeline",
    "overlapped",
    "experts",
    "hybrid, context parallel",
    "hybrid with experts",
)


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory):
    """The losses of one rank, trained once for every device and model."""

    @functools.cache
    def losses(device: str, *flags: str) -> list[float]:
        return train(device, 1, tmp_path_factory.mktemp("one"), *SPREAD.split(), *flags)

    return losses


@needs_training
@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(("cpu", name) for name in ON_CPUS),
        *(pytest.param("cuda", name, marks=pytest.mark.multigpu) for name in ON_TWO_RANKS),
    ],
)
def test_training_over_two_ranks(device, name, on_one_rank, tmp_path):
    """The losses equal those of one rank up to bf16 rounding.

    Pipeline stages and experts of other ranks start from other weights, so that only their decrease is checked.
    """
    flags = ON_TWO_RANKS[name].split()
    model = (HEAD_VECTORS if "--sb-head-norm" in flags else ()) + (tuple(LATENT.split()) if "latent" in name else ())
    model += tuple(flags[: flags.index("*-*-") + 1]) if "*-*-" in flags else ()
    expected = on_one_rank(device, *model)
    losses = train(device, 2, tmp_path, *SPREAD.split(), *flags)
    assert len(expected) == len(losses) == 20 and losses[-1] < losses[0] - 1.0
    if "pipeline" not in name and "experts" not in name:
        assert losses == pytest.approx(expected, abs=5e-2)
