"""Context parallelism over NCCL, with a GPU for each rank."""

import ast

import pytest
import torch
from support.launch import WORKERS, assert_passed, failed_checks

TIMEOUT_SECONDS = 300
# Checks of workers/context_parallel_*.py. One group of ranks runs all. The first checks have short sequences, which
# the fast kernels do not serve.
CHECKS = (
    "same_answer_as_one_rank",
    "variants_of_the_logit",
    "a_plan_serves_many_calls",
    "strides_are_taken_as_they_are",
    "autocast",
    "mass_in_one_ranks_loss",
    "shard_and_unshard",
    "refuses_unequal_chunks",
    "refuses_ranks_that_disagree",
    "refuses_a_second_derivative",
    "packed_within_the_bars",
    "streams_of_any_length",
    "a2a_gives_the_bits_of_one_rank",
    "a2a_gives_the_bits_of_one_rank_at_8k",
    "repeats_bit_for_bit_at_16k",
    "within_the_bars",
    "softmax_layouts_and_modes",
    "softmax_variants",
    "softmax_in_half_precision",
)
IN_MODELS = (
    "a_transformers_model_is_untouched",
    "with_sharded_parameters",
    "dtensors",
    "a_layer_with_sharded_parameters",
    "variants_of_the_attention_in_a_shared_sequence",
    "a_mesh_is_a_group",
)
OVER_SOCKETS = ("same_answer_as_one_rank", "packed_within_the_bars")
IN_A_GRAPH = ("replays_in_a_cuda_graph",)


def test_the_checks_exist():
    """Without GPUs too: a check that has another name now is found before the next run on several GPUs."""
    bodies = [ast.parse(path.read_text()).body for path in WORKERS.glob("context_parallel_*.py")]
    names = {node.name for body in bodies for node in body if isinstance(node, ast.FunctionDef)}
    missing = {*CHECKS, *IN_MODELS, *OVER_SOCKETS, *IN_A_GRAPH} - names
    assert not missing


def run_checks(num_ranks, checks, tmp_path, num_gpus):
    """Every check passes on every rank."""
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} CUDA devices, there are {torch.cuda.device_count()}")
    found = failed_checks(num_ranks, "cuda", checks, tmp_path / "failures.json", TIMEOUT_SECONDS)
    for check in checks:
        assert_passed(check, found)


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_on_nccl(num_ranks, tmp_path):
    """Every mode gives the results of one rank."""
    run_checks(num_ranks, CHECKS, tmp_path, num_ranks)


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_models_on_nccl(num_ranks, tmp_path):
    """Models that know nothing of other ranks, sharded parameters and DTensors give the results of one rank."""
    run_checks(num_ranks, IN_MODELS, tmp_path, num_ranks)


@pytest.mark.multigpu
def test_two_hosts_over_sockets(tmp_path, monkeypatch):
    """Every mode, "a2a+p2p" too, on two pairs of ranks that NCCL treats as two hosts.

    The log of NCCL shows which transports it used. On two GPUs the pairs share the GPUs.
    """
    monkeypatch.setenv("SB_RANKS_PER_HOST", "2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "INIT,GRAPH,P2P")
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.%p"))
    run_checks(4, OVER_SOCKETS, tmp_path, num_gpus=2)
    words = "".join(path.read_text() for path in tmp_path.glob("nccl.*"))
    assert "via NET/Socket" in words and "via P2P" in words


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_in_a_cuda_graph(num_ranks, tmp_path):
    """A layer can be captured: it does not wait for the host and allocates only from the graph's pool."""
    run_checks(num_ranks, IN_A_GRAPH, tmp_path, num_ranks)
