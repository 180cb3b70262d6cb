"""The patch of examples/lm_engine, applied to lm-engine's main branch.

LM_ENGINE is what `git clone` gets it from: its address, or a checkout. It is not installed; its dependencies must be.
"""

import os
import subprocess
from pathlib import Path

import pytest
from support.launch import run_worker

LM_ENGINE = os.environ.get("LM_ENGINE")
PATCH = Path(__file__).parents[3] / "examples/lm_engine/stickbreaking.patch"
ON_ONE_RANK = {"dense", "packed", "padded", "decoded", "without options", "loaded by this package"}
TENSOR = {f"{batch}, sequence_parallel={flag}" for batch in ("dense", "packed") for flag in (False, True)}

pytestmark = pytest.mark.skipif(LM_ENGINE is None, reason="LM_ENGINE names no repository of lm-engine")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Return a new clone with the patch."""
    folder = tmp_path_factory.mktemp("lm_engine") / "sources"
    for command in (["clone", "-q", "--depth", "1", LM_ENGINE, folder], ["-C", folder, "apply", PATCH]):
        done = subprocess.run(["git", *command], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("kind", "ranks", "cases"),
    [("one", 1, ON_ONE_RANK), ("context", 2, {"headtail", "contiguous"}), ("tensor", 2, TENSOR)],
    ids=["one rank", "context parallel", "tensor parallel"],
)
def test_logits_and_gradients_are_those_of_the_reference(kind, ranks, cases, sources, tmp_path):
    """In float64, for every parameter of the model."""
    found = run_worker("lm_engine_model.py", ranks, tmp_path / "errors.json", sources, kind)
    assert found.keys() == cases
    wrong = {f"{case}, {name}": error for case, errors in found.items() for name, error in errors.items()}
    wrong = {name: error for name, error in wrong.items() if not error < 1e-10}
    assert not wrong
