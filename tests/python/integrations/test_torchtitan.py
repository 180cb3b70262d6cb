"""The model of examples/torchtitan under torchtitan's trainer, with FSDP2 over gloo."""

import importlib.util
from pathlib import Path

import pytest
from support.launch import run_worker

STEPS = 20
# Sums over rows and channels have another order. Errors relative to the value, in fp32 after 20 steps.
TOLERANCE = 1e-5


def _is_installed() -> bool:
    """Whether there is a torchtitan whose models are given as a `ModelSpec`, as since 0.3. Imports nothing."""
    spec = importlib.util.find_spec("torchtitan")
    return spec is not None and any(
        (Path(folder) / "protocols/model_spec.py").exists() for folder in spec.submodule_search_locations
    )


pytestmark = pytest.mark.skipif(not _is_installed(), reason="torchtitan 0.3 is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder for the weights that all runs start from."""
    return tmp_path_factory.mktemp("torchtitan")


@pytest.fixture(scope="module")
def findings(folder) -> dict:
    """Return what workers/torchtitan_training.py finds."""
    return run_worker("torchtitan_training.py", 1, folder / "findings.json", folder, "cpu", seconds=900)


@pytest.mark.parametrize("name", ["one rank", "two batches"])
def test_the_loss_falls(name, findings):
    """The second run has FSDP2 over two ranks."""
    losses = findings[name]["loss"]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("context", "one rank"),
        ("context, contiguous", "one rank"),
        ("tensor", "one rank"),
        ("context, tensor", "one rank"),
        ("two batches, context", "two batches"),
    ],
)
def test_ranks_that_share_sequences_have_the_losses_of_one(name, reference, findings):
    """Parameters are sharded over all ranks that share sequences or have others, except for tensor parallelism."""
    for measure, values in findings[reference].items():
        assert findings[name][measure] == pytest.approx(values, rel=TOLERANCE), measure


@pytest.mark.gpu
def test_a_gpu_has_the_losses_of_a_cpu(findings, folder):
    """With FSDP2 over one rank and NCCL, from the same weights, in fp32."""
    on_gpu = run_worker("torchtitan_training.py", 1, folder / "gpu.json", folder, "cuda", device="cuda", seconds=300)
    for measure, values in findings["one rank"].items():
        assert on_gpu[measure] == pytest.approx(values, rel=1e-4), measure


def test_packed_documents_are_those_of_single_rows(findings):
    assert findings["packing"] < 1e-12


def test_unsuitable_options_are_refused(findings):
    assert findings["refused"] == {
        "--parallelism.spmd_backend=full_dtensor": "parallelism.spmd_backend must be spmd_types, got full_dtensor.",
        "--parallelism.context_parallel_load_balancer=ptrr": (
            "parallelism.context_parallel_load_balancer must be headtail or None, got ptrr."
        ),
        "--debug.spmd_typechecking": (
            "debug.spmd_typechecking must be false, got true. The operators have no rules for type checking."
        ),
        "--compile.enable --parallelism.context_parallel_degree=2": (
            "compile.enable must be false with parallelism.context_parallel_degree = 2, got true. torchtitan compiles "
            "a layer as one graph, and this attention breaks the graph."
        ),
    }


def test_unsuitable_sizes_of_heads_are_refused(findings):
    words = "dim must be n_heads = 4 times a multiple of 8 that is at most 256, got"
    assert findings["refused sizes"] == [f"{words} 60.", f"{words} 66.", f"{words} 2048."]
