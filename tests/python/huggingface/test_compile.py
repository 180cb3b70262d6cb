"""torch.compile of transformers models: every way to call them gives the results of eager mode."""

import pytest
import torch
from support import decoders
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


@pytest.mark.parametrize("labels", [None, IDS], ids=["logits", "loss"])
def test_one_graph_without_masks(labels):
    torch._dynamo.reset()
    model = decoders.make_model(**SIZES)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found, expected = (f(IDS, labels=labels, use_cache=False) for f in (compiled, model))
    torch.testing.assert_close(found.logits, expected.logits)
    if labels is not None:
        torch.testing.assert_close(found.loss, expected.loss)
