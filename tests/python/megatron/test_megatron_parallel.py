"""GPTModel with stick-breaking attention under torchrun and gloo: the same losses on every parallel layout."""

import math
import re

import pytest
from support.launch import run_worker
from support.messages import mentions


def test_every_layout_gives_the_losses_of_one_rank(tmp_path):
    """GPTModel over TP, CP and EP, sequences and packed documents, 6 optimizer steps each from the same weights."""
    losses = run_worker("megatron_losses.py", 4, tmp_path / "losses.json")
    one_rank = {name.partition("/")[0]: run for name, run in losses.items() if name.endswith("/1 rank")}
    assert set(one_rank) == {"batch", "multi-query", "head vectors", "gates", "latent", "packed", "experts"}
    for name, run in losses.items():  # also those of several ranks: max() would lose a NaN
        assert len(run) == 6 and all(map(math.isfinite, run)), name
    for name, run in one_rank.items():
        assert min(run[3:]) < run[0] - 0.5, f"{name} does not learn, so its losses would say little: {run}"

    def error(name: str) -> float:
        reference = one_rank[name.partition("/")[0]]
        return max(abs(a - b) for a, b in zip(losses[name], reference, strict=True))

    errors = {name: error(name) for name in losses}
    assert errors.pop("batch/misplaced CP2") > 1e-2, "keys in a wrong order must show in the losses"
    assert len(errors) == 29
    assert {name: e for name, e in errors.items() if e > 1e-4} == {}


@pytest.fixture(scope="module")
def findings(tmp_path_factory) -> dict:
    return run_worker("megatron_contract.py", 2, tmp_path_factory.mktemp("contract") / "findings.json")


def test_contract_in_process_groups(findings):
    """cp_group and local_cp_size of packed_seq_params, recomputation, one plan a batch, the bare spec in a model."""
    assert findings["differences"] == {
        "cp_group of packed_seq_params": 0.0,
        "local_cp_size=1": 0.0,
        "rows of no document": 0.0,
        "largest logits": pytest.approx(0.0, abs=1e-6),
        "recomputation": 0.0,
    }
    assert findings["plans"] == {
        "three sequences": 1,
        "three packed batches": 3,
        "one packed batch three times": 1,
        "offsets changed in place": 2,
    }
    bare = findings["bare spec"]
    assert math.isfinite(bare["loss"]) and bare["gradients are finite"]
    assert bare["cores"] == ["StickBreakingCoreAttention"] * 2
    assert bare["checkpoint keys of cores"] == []


def test_megatron_clips_the_weights_of_large_logits(findings):
    """The largest logit of a KV head was above the threshold. Then it is the threshold."""
    found = findings["clipped weights"]
    assert max(found["before"]) > 0.6
    assert found["after"] == pytest.approx([min(logit, 0.5) for logit in found["before"]], abs=1e-5)


def test_a_checkpoint_of_two_tensor_parallel_ranks_loads_on_one_and_back(findings):
    """Remainder bias and head norm are cut by heads, and whole again; losses are those of the model that was saved."""
    found = findings["head vectors"]
    names = {f"decoder.layers.{i}.self_attention.core_attention.{name}" for i in (0, 1) for name in HEAD_VECTORS}
    assert set(found["local lengths"]) == names
    assert set(found["local lengths"].values()) == {16}, "half of 4 heads of 8 channels"
    assert found["whole"] == {"one rank": True, "two ranks again": True}
    assert found["loss"] == {name: pytest.approx(found["loss"]["saved"], abs=1e-5) for name in found["loss"]}


@pytest.fixture(scope="module")
def micro_batches(tmp_path_factory) -> dict:
    return run_worker("megatron_micro_batches.py", 4, tmp_path_factory.mktemp("micro_batches") / "findings.json")


def test_recomputation_in_a_pipeline_makes_dropped_plans_again(micro_batches):
    """5 packed micro-batches on PP2 x CP2. A cache of one plan drops each plan before the backward of its batch."""
    found = micro_batches["pipeline"]
    assert {capacity: run.pop("plans") for capacity, run in found.items()} == {"16": 5, "1": 10}
    assert all(error < 2e-6 for run in found.values() for error in run.values()), found
    assert found["1"] == found["16"]


def test_groups_of_hybrid_context_parallelism_change_by_micro_batch(micro_batches):
    """Groups of 4, 2 and 1 ranks; some ranks share a stream while others have one of their own."""
    found = micro_batches["hybrid context parallelism"]
    assert found.keys() == {"loss", "gradients"} and all(error < 2e-6 for error in found.values()), found


HEAD_VECTORS = ("remainder_bias", "norm_weight", "norm_bias")
REFUSALS = {
    "learned positions": "position_embedding_type 'learned_absolute' 'none' GPTModel",
    "learned positions of softmax": "no error",
    "rope": "rotary_pos_emb --position-embedding-type none",
    "attention backend local": "core_attention DotProductAttention --attention-backend auto",
    "qk l2 norm": "config.qk_l2_norm True --qk-l2-norm spec",
    "qk layernorm": "config.qk_layernorm True --qk-layernorm spec",
    "experts": "config.num_moe_experts 2 --num-experts with_stickbreaking get_gpt_decoder_block_spec",
    "a2a": 'comm "a2a" q 3 k 1 2 ranks',
    "a2a+p2p": "cp_comm_type 'a2a+p2p' --hierarchical-context-parallel-sizes",
    "indivisible": "document 1 cu_seqlens 6 multiple 4",
    "odd sequence": "seq_len 14 multiple 4",
    "different documents": "cu_seqlens_kv cu_seqlens_q",
    "local_cp_size": "local_cp_size 2 packed_seq_params.cp_group",
}


def test_unsupported_calls_raise(findings):
    """Errors that need a built model or a process group. The worker collects their messages."""
    assert findings["refusals"].keys() == REFUSALS.keys()
    wrong = {name: said for name, said in findings["refusals"].items() if not re.search(mentions(REFUSALS[name]), said)}
    assert wrong == {}
