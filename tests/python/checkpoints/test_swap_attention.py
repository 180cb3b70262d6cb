"""Weights of models with softmax attention, read as weights of stick-breaking models."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoders import TO_CONVERT, make_model
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from megatron_sb import checkpoints, cli
from megatron_sb.huggingface import without_positions
from megatron_sb.megatron.integrity import CHECKSUMS
from megatron_sb.megatron.weights import ATTENTION
from megatron_sb.validation import InputError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
}
VARIANTS = {"plain": {}, "tied": {"tie_word_embeddings": True}, "wide heads": {"head_dim": 16}}


def saved_llama(folder, **fields):
    """Save a Llama with random weights. Return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"bos_token_id": None, "eos_token_id": 3} | fields)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_llama(variant, tmp_path):
    """The weights keep their bits. transformers' own Llama with stick-breaking attention has the same logits."""
    source = saved_llama(tmp_path / "llama", **VARIANTS[variant])
    assert checkpoints.format_of(source) == "llama"
    swapped = checkpoints.load(source, swap_attention=True)
    for name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(swapped.state_dict()[name], tensor), name
    ids = torch.randint(61, (2, 12))
    config = without_positions(LlamaConfig.from_pretrained(source))
    llama = LlamaForCausalLM.from_pretrained(source, config=config, attn_implementation="stickbreaking")
    softmax = LlamaForCausalLM.from_pretrained(source)
    with torch.no_grad():
        logits = swapped(ids).logits
        torch.testing.assert_close(logits, llama(ids).logits, rtol=1e-4, atol=1e-5)
        assert (logits - softmax(ids).logits).abs().max() > 0.01
    assert swapped.config.eos_token_id == 3


@pytest.mark.parametrize("options", [{}, {"attend_current": True, "mass_threshold": 0.25}], ids=["default", "options"])
def test_a_llama_that_breaks_sticks(options, tmp_path):
    """Nothing is swapped, and the options of its attention are kept."""
    torch.manual_seed(0)
    config = without_positions(LlamaConfig(**SIZES, initializer_range=0.3, **options))
    llama = AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking").eval()
    llama.save_pretrained(tmp_path / "llama")
    assert cli.main(["convert", str(tmp_path / "llama"), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    converted, ids = checkpoints.load(tmp_path / "out"), torch.randint(61, (2, 24))
    assert {name: getattr(converted.config, name) for name in options} == options
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, llama(ids).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"swap_attention must be False to read .*stick-breaking attention, got True"):
        checkpoints.load(tmp_path / "llama", swap_attention=True)


@pytest.mark.parametrize("rope", [None, {}, {"full_attention": None}, {"factor": 8.0}], ids=str)
def test_rotary_parameters_of_a_softmax_llama(rope, tmp_path):
    """Old and unusual configurations have softmax attention, too."""
    source = saved_llama(tmp_path / "llama")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"rope_parameters": rope}))
    with pytest.raises(ValueError, match="swap_attention must be True"):
        checkpoints.load(source)
    assert checkpoints.load(source, swap_attention=True).config.hidden_size == 32


@pytest.mark.parametrize("rope", ["x", 5, {"rope_type": []}], ids=str)
def test_rotary_parameters_of_a_wrong_type(rope, tmp_path):
    source = saved_llama(tmp_path / "llama")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"rope_parameters": rope}))
    with pytest.raises(InputError, match=r"config\.json: "):
        checkpoints.load(source, swap_attention=True)


def test_the_generation_config_is_kept(tmp_path):
    """Its end tokens can differ from those of config.json, as in models that follow instructions."""
    source = saved_llama(tmp_path / "llama")
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(source)
    assert checkpoints.load(source, swap_attention=True).generation_config.eos_token_id == [3, 4]


def test_the_command_and_back(tmp_path, capsys):
    """A Megatron checkpoint of the swapped model, to train it, holds the same weights."""
    source = saved_llama(tmp_path / "llama")
    arguments = ["convert", str(source), str(tmp_path / "swapped"), "--to"]
    assert cli.main([*arguments, "megatron", "--swap-attention"]) == 0
    assert "llama (llama) -> " in capsys.readouterr().out
    model = checkpoints.load(source, swap_attention=True)
    model.config.save_pretrained(tmp_path / "config")
    back = checkpoints.load(tmp_path / "swapped", tmp_path / "config")
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_without_a_record_of_its_attention(tmp_path):
    """With the configuration of a Hugging Face model, only the caller knows what the weights were trained for."""
    model = make_model(**TO_CONVERT)
    checkpoints.save(model, tmp_path / "source", "megatron")
    model.config.save_pretrained(tmp_path / "config")
    for name in (ATTENTION, CHECKSUMS):  # older programs write neither
        (tmp_path / "source" / "release" / name).unlink()
    for swap in (False, True):
        back = checkpoints.load(tmp_path / "source", tmp_path / "config", swap_attention=swap)
        assert torch.equal(back.lm_head.weight, model.lm_head.weight)


def test_buffers_of_old_checkpoints_are_left_out(tmp_path):
    source = saved_llama(tmp_path / "llama")
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, source / "model.safetensors")
    assert checkpoints.load(source, swap_attention=True).state_dict().keys() == weights.keys()


def test_softmax_is_not_read_silently(tmp_path, capsys):
    source = saved_llama(tmp_path / "llama")
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--to", "huggingface"]) == 2
    assert "swap_attention must be True (--swap-attention) to read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_a_stick_breaking_model_has_nothing_to_swap(to, tmp_path):
    model = make_model(**TO_CONVERT)
    checkpoints.save(model, tmp_path / "source", to)
    model.config.save_pretrained(tmp_path / "config")
    config = tmp_path / "config" if to == "megatron" else None
    with pytest.raises(ValueError, match=r"swap_attention must be False to read .*stick-breaking attention, got True"):
        checkpoints.load(tmp_path / "source", config, swap_attention=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ],
)
def test_options_that_the_model_lacks(fields, message, tmp_path):
    source = saved_llama(tmp_path / "llama", **fields)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(source, swap_attention=True)
