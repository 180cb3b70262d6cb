"""Generation with a static cache under torch.compile chooses the tokens of eager generation."""

import pytest
import torch
from support import decoders
from support.messages import mentions
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, StaticCache
from transformers.masking_utils import create_masks_for_generate

from megatron_sb.huggingface import without_positions
from megatron_sb.huggingface.modeling import CACHE_FIELD

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
NUM_NEW, PROMPT = 4, 19  # a prompt of more than 16 tokens is no decoding step
IDS = torch.arange(2 * PROMPT).view(2, PROMPT) * 7 % 96 + 1
MASKS = {side: torch.ones(2, PROMPT, dtype=torch.long) for side in ("none", "left", "right")}
MASKS["left"][1, :7] = 0
MASKS["right"][1, -3:] = 0


def make_llama():
    torch.manual_seed(1)
    config = without_positions(LlamaConfig(**SIZES))
    return AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking").eval()


MODELS = {
    "llama": make_llama,
    "stickbreaking": lambda: decoders.make_model(**SIZES),
    "gates, Euclidean": lambda: decoders.make_model(**SIZES, **decoders.GATES, **decoders.EUCLIDEAN),
    "head vectors": lambda: decoders.make_model(**SIZES, **decoders.HEAD_VECTORS),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch._dynamo.reset()
    return MODELS[request.param]()


class Graphs:
    """A backend that runs graphs as they are, and counts them. Copies of a configuration share it."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward

    def __deepcopy__(self, memo):
        return self


def greedy(model, padding="none", **options):
    """Return the new tokens of greedy generation."""
    options = {"attention_mask": MASKS[padding], "max_new_tokens": NUM_NEW, "eos_token_id": None} | options
    return model.generate(IDS, do_sample=False, **options)[:, PROMPT:].tolist()


def step_by_step(model, step, padding="none", given="mask"):
    """Generate with a static cache: the prompt with `model`, the other tokens with `step`.

    Args:
        model: the eager model.
        step: computes one token. It may be compiled.
        padding: side of the padding.
        given: what the steps get: "nothing", "mask" (b, keys so far), or "prepared", the mask as generate() makes it.
    """
    cache, mask = StaticCache(model.config, max_cache_len=48), MASKS[padding]
    found, options = [], {CACHE_FIELD: cache}
    with torch.no_grad():
        new = model(IDS, attention_mask=mask, **options).logits[:, -1:].argmax(-1)
        for _ in range(NUM_NEW - 1):
            found.append(new)
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            inputs = {"nothing": {}, "mask": {"attention_mask": mask}, "prepared": {"attention_mask": mask}}[given]
            if given == "prepared":
                inputs["attention_mask"] = create_masks_for_generate(
                    model.config, torch.empty(2, 1, 0), mask, **options, position_ids=None
                )
            new = step(new, **inputs, **options).logits[:, -1:].argmax(-1)
    return torch.cat([*found, new], 1).tolist()


@pytest.mark.parametrize(("padding", "given"), [("none", "nothing"), ("left", "prepared")])
def test_one_graph_for_all_steps(model, padding, given):
    """No step reads a value on the host. Padding on the left is read when the mask is made, outside of the graph."""
    graphs = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    assert step_by_step(model, compiled, padding, given) == greedy(model, padding)
    assert graphs.frame_count == 1


def test_steps_with_a_mask_break_the_graph():
    """The mask (b, keys so far) grows with each step. Its values say where the padding is."""
    torch._dynamo.reset()
    model = decoders.make_model(**SIZES | {"num_hidden_layers": 1})  # each step compiles all layers again
    compiled = torch.compile(model, backend="eager")
    assert step_by_step(model, compiled, "right") == greedy(model, "right")


def test_generate_compiles_its_steps_to_one_graph(model):
    """generate() does so by itself on a GPU. A hidden option makes it do so on a CPU."""
    graphs = Graphs()
    config = CompileConfig(backend=graphs, fullgraph=True, mode=None)
    config._compile_all_devices = True
    found = greedy(model, "left", cache_implementation="static", compile_config=config)
    assert found == greedy(model, "left")
    assert graphs.count == 1


def test_generate_of_a_compiled_forward():
    """The prompt is compiled too. It breaks the graph."""
    torch._dynamo.reset()
    model, graphs = make_llama(), Graphs()
    expected = greedy(model, "left")
    model.forward = torch.compile(model.forward, backend=graphs)
    assert greedy(model, "left", cache_implementation="static") == expected
    assert graphs.count > 1


def test_generate_of_a_compiled_model():
    """transformers generates with the model inside of a compiled model, which is not compiled."""
    model = make_llama()
    expected = greedy(model, "left")
    assert greedy(torch.compile(model, backend="eager"), "left", cache_implementation="static") == expected


def test_experts_break_the_graph():
    """A step also computes the load-balancing loss, from the same mask."""
    torch._dynamo.reset()
    model = decoders.make_model(**SIZES, **decoders.EXPERTS, output_router_logits=True)
    config = CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True
    found = greedy(model, "left", cache_implementation="static", compile_config=config)
    assert found == greedy(model, "left")


@pytest.mark.parametrize("name", ["llama", "stickbreaking"])
def test_a_prepared_mask_has_no_gradients(name):
    torch._dynamo.reset()
    model, new = MODELS[name](), torch.ones(2, 1, dtype=torch.long)
    cache = StaticCache(model.config, max_cache_len=48)
    with torch.no_grad():
        model(IDS, **{CACHE_FIELD: cache})
        mask = create_masks_for_generate(
            model.config, torch.empty(2, 1, 0), None, **{CACHE_FIELD: cache}, position_ids=None
        )
    with pytest.raises(ValueError, match=mentions("attention_mask gradients torch.no_grad()")):
        model(new, attention_mask=mask, **{CACHE_FIELD: cache})


def test_gradients_of_a_step_with_a_static_cache():
    """Without a prepared mask, a step with gradients has the logits of a whole forward."""
    model = MODELS["stickbreaking"]()
    cache, new = StaticCache(model.config, max_cache_len=48), torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        model(IDS, **{CACHE_FIELD: cache})
    logits = model(new, **{CACHE_FIELD: cache}).logits
    assert logits.requires_grad
    expected = model(torch.cat([IDS, new], 1)).logits[:, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
