"""Two tensor-parallel ranks save a Megatron-Core checkpoint. It is converted to transformers and back."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.launch import run_worker
from support.megatron_loop import needs_training, train

from megatron_sb import checkpoints
from megatron_sb.huggingface import StickBreakingConfig
from megatron_sb.megatron.settings import MARKER
from megatron_sb.megatron.weights import EMBEDDING, read_attention_kind, read_weights

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
FLAGS = (
    "--ffn-hidden-size 96 --swiglu --disable-bias-linear --normalization RMSNorm --use-distributed-optimizer "
    "--untie-embeddings-and-output-weights --sb-head-norm --use-cpu-initialization --ckpt-format torch_dist "
    "--calculate-per-token-loss"
)


@pytest.mark.parametrize("kind", ["dense", "experts", "gates"])
def test_there_and_back(kind, tmp_path):
    """Losses in transformers are equal. After conversion back, bits are equal and another layout resumes training."""
    found = run_worker("converted_checkpoints.py", 2, tmp_path / "out.json", kind)
    assert found["transformers"] == pytest.approx(found["trained"], rel=1e-5)
    assert found["names"][0] == found["names"][1] and found["equal"]
    assert found["optimizers"] == [True, False]
    assert found["loaded"] == pytest.approx(found["trained"], rel=1e-5)
    assert found["after a step of rate 0"] == found["loaded"]
    assert sum(found["after a step"]) < sum(found["loaded"])


@needs_training
def test_megatrons_scripts_save_and_load(tmp_path):
    """Megatron's loop trains and saves on two tensor-parallel ranks. The converted checkpoint has the same loss."""

    def losses(ranks: int, *flags: object) -> list[float]:
        return train("cpu", ranks, tmp_path / "cache", *FLAGS.split(), *map(str, flags))

    saved, back = tmp_path / "saved", tmp_path / "back"
    split = ("--tensor-model-parallel-size", 2)
    trained = losses(2, *split, "--train-iters", 10, "--lr", 5e-3, "--save", saved, "--save-interval", 10)
    StickBreakingConfig(vocab_size=128, head_norm=True, **SIZES).save_pretrained(tmp_path / "config")
    model = checkpoints.load(saved, tmp_path / "config")
    assert model.dtype == torch.bfloat16
    checkpoints.save(model, back, "megatron")
    still = ("--finetune", "--no-load-optim", "--no-load-rng", "--lr", 0, "--train-iters", 3)
    expected, found = (losses(1, "--load", folder, *still) for folder in (saved, back))
    assert found == expected and len(found) == 3
    assert found[0] < trained[0] - 0.3


@pytest.mark.parametrize(("marked", "kind"), [((), None), ((0,), "mixed"), ((0, 1), "stick_breaking")])
def test_markers_of_megatrons_loop(marked, kind, tmp_path):
    """They say which layers are stick-breaking. A model with other layers, too, has no place in the other formats."""
    layers = [f"decoder.layers.{number}.self_attention" for number in range(2)]
    state = {f"{layer}.linear_proj.weight": torch.zeros(8, 8) for layer in layers} | {EMBEDDING: torch.zeros(8, 8)}
    state |= {f"{layers[number]}.core_attention.{MARKER}/shard_0_1": [True] for number in marked}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text("{}")
    assert read_attention_kind(tmp_path) == kind
    StickBreakingConfig(vocab_size=8, hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path / "config")
    words = {None: "Missing weights", "mixed": "'stick_breaking' .* got 'mixed'", "stick_breaking": "swap_attention"}
    with pytest.raises(ValueError, match=words[kind]):
        checkpoints.load(tmp_path, tmp_path / "config", swap_attention=kind != "mixed")
    (tmp_path / ".metadata").write_bytes(b"cut off")
    assert read_attention_kind(tmp_path) is None  # the loader of the weights reports the file


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}.* distributed checkpoint"):
        read_weights(tmp_path)
