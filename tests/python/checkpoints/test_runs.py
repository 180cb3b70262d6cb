"""Checkpoints in the folder of a run. The folder names the model and holds the configuration."""

from pathlib import Path

import pytest
import torch
from support import decoders

from megatron_sb import checkpoints, cli
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.megatron.integrity import write_checksums
from megatron_sb.megatron.weights import write_attention_kind
from megatron_sb.training import config as configuration
from megatron_sb.validation import InputError

CONFIGS = Path(__file__).parents[3] / "configs"
OPTIONS = {
    "stick_breaking_remainder_norm": {"remainder_bias": True, "head_norm": True},
    "stick_breaking_attend_current": {"attend_current": True},
    "stick_breaking_euclidean": {"logits": "euclidean"},
    "stick_breaking_forget_gate": {"forget_gate": True},
}
DEFAULTS = {"remainder_bias": False, "head_norm": False, "attend_current": False}
DEFAULTS |= {"logits": "dot", "forget_gate": False}


def save(run, model, config, **options):
    """Save a checkpoint of one of the run's models. Return its folder and its weights."""
    sizes = config.model
    built = decoders.make_model(
        vocab_size=sizes.padded_vocab_size(config.vocab_size),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        **options,
    )
    folder = run / model / "checkpoints" / "short-000100"
    checkpoints.save(built, run / "converted", "megatron")
    folder.parent.mkdir(parents=True)
    (run / "converted" / "release").rename(folder)
    write_attention_kind(folder, config.attention[model].kind)  # as the trainer does
    write_checksums(folder)
    (run / "config.yaml").write_text(configuration.to_yaml(config))
    return folder, built.state_dict()


@pytest.mark.parametrize("model", OPTIONS)
@pytest.mark.parametrize("named", [False, True], ids=["by default", "named"])
def test_one_of_several_stick_breaking_models(model, named, tmp_path):
    """The folder selects the model's options; every weight is kept."""
    config = configuration.load_config(CONFIGS / "extrapolation_small.yaml")
    folder, weights = save(tmp_path, model, config, **OPTIONS[model])
    back = checkpoints.load(folder, tmp_path / "config.yaml" if named else None)
    assert {name: getattr(back.config, name) for name in DEFAULTS} == DEFAULTS | OPTIONS[model]
    assert back.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.state_dict().items())


def test_the_scale_of_the_logits(tmp_path):
    scale = "attention.stick_breaking_euclidean.scale=0.0625"
    config = configuration.load_config(CONFIGS / "extrapolation_small.yaml", [scale])
    folder, _ = save(tmp_path, "stick_breaking_euclidean", config, logits="euclidean")
    assert checkpoints.load(folder).config.attention_multiplier == 0.0625


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("softmax_rope", r"swap_attention must be True .*softmax_rope.*, which has softmax attention, got False"),
        ("softmax_nope", r"swap_attention must be True .*softmax_nope"),
    ],
)
@pytest.mark.parametrize("named", [False, True], ids=["by default", "named"])
def test_models_that_no_format_supports(model, message, named, tmp_path):
    """Their weights have the names of a plain model's, so that only the configuration can reject them."""
    config = configuration.load_config(CONFIGS / "extrapolation_small.yaml")
    folder, _ = save(tmp_path, model, config)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(folder, tmp_path / "config.yaml" if named else None)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "of the run"])
def test_another_number_of_heads(recorded, tmp_path):
    """Their weights have the same shapes. Earlier versions did not record the heads."""
    config = configuration.load_config(CONFIGS / "tiny_context_extension.yaml")
    folder, _ = save(tmp_path / "run", "stick_breaking", config)
    back = checkpoints.load(folder)
    if recorded:  # also without the run
        checkpoints.save(back, tmp_path / "out", "megatron")
        folder = tmp_path / "out" / "release"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
    StickBreakingConfig(**back.config.to_dict() | sizes).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match=r"config must describe the model in .* num_heads is 4, got .*, where it is 8"):
        checkpoints.load(folder, tmp_path / "other")
    back.config.save_pretrained(tmp_path / "same")
    assert checkpoints.load(folder, tmp_path / "same").config.num_attention_heads == 4


def test_softmax_attention_with_gates(tmp_path):
    """Its gates have no place in stick-breaking attention."""
    gates = "attention.softmax_nope={kind: softmax, position: none, forget_gate: true}"
    config = configuration.load_config(CONFIGS / "extrapolation_small.yaml", [gates])
    folder, _ = save(tmp_path, "softmax_nope", config)
    with pytest.raises(ValueError, match=r"attention\.softmax_nope\.forget_gate must be False .* got True"):
        checkpoints.load(folder, swap_attention=True)


def test_softmax_attention_is_swapped(tmp_path):
    """Every weight is kept; the attention is the default one."""
    config = configuration.load_config(CONFIGS / "extrapolation_small.yaml")
    folder, weights = save(tmp_path, "softmax_rope", config)
    back = checkpoints.load(folder, swap_attention=True)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.state_dict().items())
    folder, _ = save(tmp_path / "other", "stick_breaking", config)
    with pytest.raises(ValueError, match="swap_attention must be False"):
        checkpoints.load(folder, swap_attention=True)


def test_the_record_of_a_copied_checkpoint_counts(tmp_path):
    """The folder does not name the model, and the run's only stick-breaking model is another one."""
    config = configuration.load_config(CONFIGS / "tiny_context_extension.yaml")
    folder, weights = save(tmp_path / "run", "softmax_rope", config)
    folder = folder.rename(tmp_path / "copied")
    with pytest.raises(ValueError, match=r"swap_attention must be True .*copied, which has softmax attention"):
        checkpoints.load(folder, tmp_path / "run" / "config.yaml")
    back = checkpoints.load(folder, tmp_path / "run" / "config.yaml", swap_attention=True)
    assert torch.equal(back.lm_head.weight, weights["lm_head.weight"])
    other, _ = save(tmp_path / "other", "stick_breaking", config)
    softmax = other.parent.parent.rename(tmp_path / "other" / "softmax_rope")
    with pytest.raises(ValueError, match=r"config must describe the model .* 'stick_breaking', got .* it is 'softmax'"):
        checkpoints.load(softmax / "checkpoints" / "short-000100")


def test_names_of_checkpoints_that_are_not_text(tmp_path, capsys):
    """Damaged files of a run, and of Megatron-LM's scripts."""
    config = configuration.load_config(CONFIGS / "tiny_context_extension.yaml")
    save(tmp_path / "run", "stick_breaking", config)
    for file in (tmp_path / "run/stick_breaking/checkpoints/latest", tmp_path / "latest_checkpointed_iteration.txt"):
        file.write_bytes(b"\xff\xfe")
        assert cli.main(["convert", str(file.parent), str(tmp_path / "out"), "--to", "fla"]) == 2
        message = capsys.readouterr().err
        assert str(file.parent) in message and "xff" in message and message.count("\n") == 1, message


def test_a_checkpoint_outside_of_its_run(tmp_path):
    """The run's only stick-breaking model is chosen. With several of them it is an error."""
    config = configuration.load_config(CONFIGS / "tiny_context_extension.yaml")
    folder, weights = save(tmp_path / "run", "stick_breaking", config)
    elsewhere = tmp_path / "copied"
    folder.rename(elsewhere)
    with pytest.raises(FileNotFoundError, match=r"--config.* got None: .*copied is not in .*config\.yaml"):
        checkpoints.load(elsewhere)
    with pytest.raises(FileNotFoundError, match=r"config must be .*, got nowhere\.yaml, which is missing"):
        checkpoints.load(elsewhere, "nowhere.yaml")
    with pytest.raises(FileNotFoundError, match=r"config must be .*, got .*/run, which has no config\.json"):
        checkpoints.load(elsewhere, tmp_path / "run")
    back = checkpoints.load(elsewhere, tmp_path / "run" / "config.yaml")
    assert torch.equal(back.lm_head.weight, weights["lm_head.weight"])
    with pytest.raises(ValueError, match=r"compare must have exactly one stick-breaking model, got 5 .*copied"):
        checkpoints.load(elsewhere, CONFIGS / "extrapolation_small.yaml")
