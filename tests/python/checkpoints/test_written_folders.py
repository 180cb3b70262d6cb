"""Arguments of `checkpoints.save`, and what it leaves after an error."""

import pytest
import torch
from support.decoders import TO_CONVERT, make_model
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_sb import checkpoints
from megatron_sb.validation import InputError

LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize("to", checkpoints.FORMATS)
@pytest.mark.parametrize("kind", ["base model", "Llama", "weights", "path"])
def test_another_model(kind, to, tmp_path):
    """A folder without an output layer, or of another architecture, could not be read again."""
    model = make_model(**TO_CONVERT)
    others = {
        "base model": model.model,
        "Llama": LlamaForCausalLM(LlamaConfig(**LLAMA)),
        "weights": model.state_dict(),
        "path": str(tmp_path),
    }
    other = others[kind]
    with pytest.raises(ValueError, match=f"model must be a StickBreakingForCausalLM, got {type(other).__name__}"):
        checkpoints.save(other, tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_does_not_exist(tmp_path):
    """A mistyped path would give a model without its tokenizer."""
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(InputError, match=rf"tokenizer must be a folder, got '{tmp_path}/{name}'") as error:
            checkpoints.save(make_model(**TO_CONVERT), tmp_path / "out", "fla", tokenizer=tmp_path / name)
        assert isinstance(error.value, FileNotFoundError) and not (tmp_path / "out").exists()


def test_new_parents_of_out(tmp_path):
    """An error removes them, too. Parents that existed stay."""
    (tmp_path / "old").mkdir()
    model = make_model(**TO_CONVERT, remainder_bias=True)
    with pytest.raises(InputError, match="remainder_bias must be False in the fla format"):
        checkpoints.save(model, tmp_path / "old" / "new" / "newer" / "out", "fla")
    assert (tmp_path / "old").exists() and not list((tmp_path / "old").iterdir())
    checkpoints.save(model, tmp_path / "old" / "new" / "newer" / "out", "dolomite")
    assert checkpoints.format_of(tmp_path / "old" / "new" / "newer" / "out") == "dolomite"


@pytest.mark.parametrize("to", ["dolomite", "fla"])
def test_heads_that_a_format_does_not_store(to, tmp_path):
    """The message names the only head_dim as the integer that it is."""
    with pytest.raises(InputError, match=rf"head_dim must be 8 in the {to} format, got 16\."):
        checkpoints.save(make_model(**TO_CONVERT | {"head_dim": 16}), tmp_path / "out", to)
    assert not list(tmp_path.iterdir())


def test_two_commands_do_not_write_one_folder(tmp_path, monkeypatch):
    """The second one removed the unfinished files of the first. What a killed one left does not count."""
    (tmp_path / ".out.tmp" / "release").mkdir(parents=True)
    model, write, refused = make_model(**TO_CONVERT), checkpoints._save, []

    def save(*arguments):
        with pytest.raises(
            InputError, match=r"out must be written by one command at a time, got another one that writes"
        ):
            checkpoints.save(model, tmp_path / "out", "fla")
        refused.append(True)
        write(*arguments)

    monkeypatch.setattr(checkpoints, "_save", save)
    checkpoints.save(model, tmp_path / "out", "dolomite")
    assert refused == [True] and checkpoints.format_of(tmp_path / "out") == "dolomite"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]


@pytest.mark.parametrize("out", ["new/..", "..", ".", "/"])
def test_a_parent_as_out(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"out must be a new folder, got '{out}'"):
        checkpoints.check_target(out, "fla")
    with pytest.raises(InputError, match=f"out must be a new folder, got '{out}'"):
        checkpoints.save(make_model(**TO_CONVERT), out, "fla")
    assert not list(tmp_path.iterdir())


def with_adapter(model):
    projection = model.model.layers[0].self_attn.q_proj
    projection.lora = torch.nn.Linear(32, 2)


def without_a_layer(model):
    del model.model.layers[1]


def of_another_vocabulary(model):
    model.config.vocab_size = 60


def with_an_output_layer(model):
    model.config.tie_word_embeddings = True


def with_a_shared_output_layer(model):
    model.lm_head.weight = model.model.embed_tokens.weight


@pytest.mark.parametrize("to", checkpoints.FORMATS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_adapter, r"for .*q_proj\.lora\.bias no such weight, got \(2,\)\. Merge adapters"),
        (without_a_layer, r"for model\.layers\.1\.[^ ]* \(32,\), got no such weight"),
        (of_another_vocabulary, r"for lm_head\.weight \(60, 32\), got \(61, 32\)"),
        (with_an_output_layer, "tie_word_embeddings must be False if the output layer differs"),
        (
            with_a_shared_output_layer,
            "tie_word_embeddings must be True if the output layer is the embedding, got False",
        ),
    ],
)
def test_weights_that_the_configuration_does_not_describe(change, message, to, tmp_path):
    """They could not be read again, or the output layer would be lost."""
    model = make_model(**TO_CONVERT)
    change(model)
    with pytest.raises(InputError, match=message):
        checkpoints.save(model, tmp_path / "out", to)
    assert not list(tmp_path.iterdir())
