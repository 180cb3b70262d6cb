"""A checkpoint of Megatron-Core's, saved by two tensor-parallel ranks, as a model of transformers and back."""

import pytest
from support.launch import run_worker

from megatron_sb.megatron.weights import read_weights


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_there_and_back(kind, tmp_path):
    """The same losses in transformers; the same bits after the way back, from where another layout trains on."""
    found = run_worker("converted_checkpoints.py", 2, tmp_path / "out.json", kind)
    assert found["transformers"] == pytest.approx(found["trained"], rel=1e-5)
    assert found["names"][0] == found["names"][1] and found["equal"]
    assert found["optimizers"] == [True, False]
    assert found["loaded"] == pytest.approx(found["trained"], rel=1e-5)
    assert found["after a step of rate 0"] == found["loaded"]
    assert sum(found["after a step"]) < sum(found["loaded"])


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="is no distributed checkpoint of Megatron-Core's"):
        read_weights(tmp_path)
