"""torch.compile of transformers models: every way to call them gives the results of eager mode."""

import pytest
import torch
from support import decoders
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_sb.huggingface import without_positions

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
IDS = torch.arange(24).view(2, 12) * 7 % 96 + 1
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[1, :4] = 0
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
BOUNDS = torch.tensor([0, 5, 12], dtype=torch.int32)
CALLS = {
    "plain": {"input_ids": IDS},
    "a mask of ones": {"input_ids": IDS, "attention_mask": torch.ones_like(PADDED)},
    "padding": {"input_ids": IDS, "attention_mask": PADDED},
    "positions": {"input_ids": IDS[:1], "position_ids": POSITIONS},
    "bounds": {"input_ids": IDS[:1], "cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS},
}


def make_llama():
    torch.manual_seed(1)
    config = without_positions(LlamaConfig(**SIZES))
    return AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking").eval()


@pytest.fixture(params=[make_llama, lambda: decoders.make_model(**SIZES)], ids=["llama", "stickbreaking"])
def model(request):
    torch._dynamo.reset()
    return request.param()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_of_eager_mode(model, call):
    with torch.no_grad():
        expected = model(**call, use_cache=False).logits
        found = torch.compile(model, backend="eager")(**call, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    if "position_ids" in call or "cu_seq_lens_q" in call:  # the documents matter
        assert (found - model(IDS[:1]).logits).abs().max() > 1e-3


@pytest.mark.parametrize("mask", [torch.ones_like(IDS[:1]), PADDED[1:]], ids=["ones", "padding"])
def test_positions_next_to_a_mask(mask):
    """The documents of position_ids count where nothing is padding, as in eager mode."""
    torch._dynamo.reset()
    model = decoders.make_model(**SIZES)
    call = {"input_ids": IDS[:1], "attention_mask": mask, "position_ids": POSITIONS, "use_cache": False}
    found = torch.compile(model, backend="eager")(**call).logits
    torch.testing.assert_close(found, model(**call).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("labels", [None, IDS], ids=["logits", "loss"])
def test_one_graph_without_masks(labels):
    torch._dynamo.reset()
    model = decoders.make_model(**SIZES)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found, expected = (f(IDS, labels=labels, use_cache=False) for f in (compiled, model))
    torch.testing.assert_close(found.logits, expected.logits)
    if labels is not None:
        torch.testing.assert_close(found.loss, expected.loss)


OTHER_PADDED = torch.ones(2, 12, dtype=torch.long)
OTHER_PADDED[0, 9:] = OTHER_PADDED[1] = 0  # padding on the right, and a row of nothing else


def bounds(*offsets):
    """Return the arguments of 12 packed tokens. Documents of no tokens at the end give all batches one shape."""
    offsets = torch.tensor(offsets, dtype=torch.int32)
    return {"input_ids": IDS[:1], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}


ONE_GRAPH = {
    "stickbreaking, masks": (
        lambda: decoders.make_model(**SIZES),
        [{"input_ids": IDS, "attention_mask": mask} for mask in (PADDED, torch.ones_like(PADDED), OTHER_PADDED)],
    ),
    "gates, Euclidean, masks": (
        lambda: decoders.make_model(**SIZES, **decoders.GATES, **decoders.EUCLIDEAN),
        [{"input_ids": IDS, "attention_mask": mask} for mask in (PADDED, torch.ones_like(PADDED), OTHER_PADDED)],
    ),
    "llama, masks": (
        make_llama,
        [{"input_ids": IDS, "attention_mask": mask} for mask in (PADDED, torch.ones_like(PADDED), OTHER_PADDED)],
    ),
    "stickbreaking, documents": (
        lambda: decoders.make_model(**SIZES),
        [bounds(0, 5, 12, 12, 12), bounds(0, 12, 12, 12, 12), bounds(0, 1, 2, 7, 12)],
    ),
}


@pytest.mark.parametrize("case", ONE_GRAPH)
def test_one_graph_serves_all_values(case):
    """Masks and offsets of one shape need one graph without breaks, and no graph of their own."""
    torch._dynamo.reset()
    make_model, calls = ONE_GRAPH[case]
    model, graphs = make_model(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for call in calls:
        with torch.no_grad():
            found, expected = (f(**call, use_cache=False).logits for f in (compiled, model))
        tokens = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
        torch.testing.assert_close(found[tokens], expected[tokens], atol=1e-5, rtol=1e-4)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("case", ONE_GRAPH)
def test_gradients_of_one_graph(case):
    torch._dynamo.reset()
    make_model, (call, *_) = ONE_GRAPH[case]
    model = make_model()
    gradients = []
    for f in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        logits = f(**call, use_cache=False).logits
        logits[call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()].pow(2).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for found, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offsets", [(0, 5, 11), (0, 11)], ids=str)
def test_wrong_documents_of_a_graph(offsets):
    torch._dynamo.reset()
    compiled = torch.compile(decoders.make_model(**SIZES), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="cu_seq_lens_q must end at the number of tokens"):
        compiled(**bounds(*offsets), use_cache=False)
