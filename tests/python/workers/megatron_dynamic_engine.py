"""Serve requests with Megatron-Core's engine of dynamic inference, and write what it generated as JSON.

`megatron_dynamic_engine.py OUT.json DEVICE CASE...`, where DEVICE is cuda or cpu. On a GPU the models have bf16 weights
and the layers of Transformer Engine, if it is installed. On a CPU they have float64 weights and local layers, and fakes
answer for the GPU that Megatron asks for. Needs Megatron-Core 0.17 or later.

What the engine generated is compared with a forward of each whole text, and with static inference of the same text.
"""

import contextlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers import mtp_utils_pytorch, text_generation_controller
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig, attention

from megatron_sb.megatron import with_stickbreaking

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker

ON_GPU = sys.argv[2:3] == ["cuda"]
DEVICE = "cuda" if ON_GPU else "cpu"
HAS_TRANSFORMER_ENGINE = ON_GPU and importlib.util.find_spec("transformer_engine") is not None
VOCABULARY, MAX_LENGTH, BLOCK = 128, 512, 64
SHARED = 2 * BLOCK  # tokens that the prompts of the last two requests have in common
REQUESTS = (  # the step at which a request comes, the length of its prompt, tokens to generate
    (0, 150, 40),
    (0, 3, 70),
    (2, 1, 30),
    (3, 250, 12),
    (3, 64, 1),
    (9, 200, 20),
    (14, 140, 24),
)
OPTIONS = {"remainder_bias": True, "head_norm": True, "reach": (0.5, 6.0), "attend_current": True}
GRAPHS = {"cuda_graph_impl": "local", "inference_rng_tracker": True}
DECODING_GRAPHS = {"num_cuda_graphs": 4, "use_cuda_graphs_for_non_decode_steps": False}
# Options of the layers, fields of TransformerConfig and of InferenceConfig.
CASES = {
    "plain": ({}, {}, {}),
    "options": (OPTIONS, {}, {}),
    "prompts in chunks": ({}, {}, {"enable_chunked_prefill": True, "max_tokens": 128}),
    "shared prefixes": ({}, {}, {"enable_prefix_caching": True}),
    "speculative tokens": ({}, {"mtp_num_layers": 2}, {"num_speculative_tokens": 2}),
    "CUDA graphs of layers": ({}, GRAPHS | {"inference_cuda_graph_scope": "layer"}, DECODING_GRAPHS),
    "CUDA graphs of all layers": ({}, GRAPHS | {"inference_cuda_graph_scope": "block"}, DECODING_GRAPHS),
}


def make_model(options: dict, changes: dict) -> GPTModel:
    """Return a model whose logits differ enough that rounding seldom changes the largest one."""
    torch.manual_seed(3)
    if ON_GPU:
        model_parallel_cuda_manual_seed(3, inference_rng_tracker=True, force_reset_rng=True)
    dtype = torch.bfloat16 if ON_GPU else torch.float64
    config = TransformerConfig(
        num_layers=4 if ON_GPU else 2,
        hidden_size=256 if ON_GPU else 32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=ON_GPU,
        **changes,
    )
    make = get_gpt_layer_with_transformer_engine_spec if HAS_TRANSFORMER_ENGINE else get_gpt_layer_local_spec
    spec = with_stickbreaking(make(), **options)
    mtp = None
    if "mtp_num_layers" in changes:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=HAS_TRANSFORMER_ENGINE)
    model = GPTModel(config, spec, VOCABULARY, MAX_LENGTH, position_embedding_type="none", mtp_block_spec=mtp)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model.to(device=DEVICE, dtype=dtype).eval()


def make_engine(model: GPTModel, settings: dict) -> DynamicInferenceEngine:
    """Return an engine for a model."""
    settings = {"max_requests": 8, "max_tokens": 1024, **settings}
    inference = InferenceConfig(
        max_sequence_length=MAX_LENGTH, block_size_tokens=BLOCK, buffer_size_gb=0.05, unified_memory_level=0, **settings
    )
    context = DynamicInferenceContext(model.config, inference)
    tokenizer = SimpleNamespace(vocab_size=VOCABULARY, detokenize=lambda tokens: "", eod=None)
    wrapper = GPTInferenceWrapper(model, context)
    wrapper.model_is_pipeline_parallel = False
    return DynamicInferenceEngine(text_generation_controller.TextGenerationController(wrapper, tokenizer), context)


def make_prompts() -> list[list[int]]:
    """Return the prompts. The last one begins with the same tokens as the one before."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for _, length, _ in REQUESTS]
    prompts[-1][:SHARED] = prompts[-2][:SHARED]
    return prompts


def serve(engine: DynamicInferenceEngine, prompts: list[list[int]], log_probs: bool) -> tuple[dict, set[str]]:
    """Return what the engine generated for each request, and which kinds of steps it made."""
    finished, kinds, context = {}, set(), engine.context
    forward = engine.controller._dynamic_step_forward_logits

    def observed(*args) -> None:
        graph = "graph of " if context.using_cuda_graph_this_step() else ""
        kinds.add(graph + ("decoding" if context.is_decode_only() else "prompts"))
        if context.num_decode_requests and context.num_prefill_requests:
            kinds.add("both")
        forward(*args)

    engine.controller._dynamic_step_forward_logits = observed
    for step in range(400):
        for number, (begin, _, new) in enumerate(REQUESTS):
            if begin == step:
                sampling = SamplingParams(num_tokens_to_generate=new, termination_id=-1, top_k=1)
                sampling.return_log_probs = sampling.skip_prompt_log_probs = log_probs
                engine.add_request(number, prompts[number], sampling)
        with torch.inference_mode():
            result = engine.step_modern()
        finished |= {record.request_id: record.merge() for record in result["finished_request_records"]}
        if len(finished) == len(REQUESTS):
            return finished, kinds
    raise AssertionError(f"requests {sorted({*range(len(REQUESTS))} - {*finished})} did not end within 400 steps")


def logits_of_whole_text(model: GPTModel, prompt: list[int], new: list[int]) -> torch.Tensor:
    """Return the logits of each new token from one forward of the whole text, (new, vocabulary)."""
    text = torch.tensor([prompt + new], device=DEVICE)
    with torch.inference_mode():
        return model(text, None, None, runtime_gather_output=True)[0, len(prompt) - 1 : -1]


def logits_of_static_inference(model: GPTModel, prompt: list[int], new: list[int]) -> torch.Tensor:
    """Return the logits of each new token from Megatron's static inference: the prompt, then single tokens."""
    context = StaticInferenceContext(max_batch_size=1, max_sequence_length=MAX_LENGTH)
    parts = []
    for tokens in (prompt, *([token] for token in new[:-1])):
        with torch.inference_mode():
            rows = torch.tensor([tokens], device=DEVICE)
            logits = model(rows, None, None, inference_context=context, runtime_gather_output=True)
        context.sequence_len_offset += len(tokens)
        parts.append(logits[0, -1:])
    return torch.cat(parts)


def compare(model: GPTModel, prompt: list[int], request) -> dict[str, dict]:
    """Compare what the engine generated for a request with a forward of the whole text and with static inference.

    Returns, for each of both:
        regret: how far the logits of the generated tokens are below the largest ones.
        log_prob: the largest error of the engine's log probabilities, or None without them.
        greedy: how many of the tokens have the largest logit.
        Differences are divided by the largest absolute logit.
    """
    new = [int(token) for token in request.generated_tokens]
    chosen = torch.tensor(new, device=DEVICE)[:, None]
    found = {"new": len(new)}
    for name, of in (("whole text", logits_of_whole_text), ("static inference", logits_of_static_inference)):
        logits = of(model, prompt, new).double()
        unit = logits.abs().max()
        regret, error = logits.amax(dim=1) - logits.gather(1, chosen)[:, 0], None
        if request.generated_log_probs:
            exact = logits.log_softmax(dim=1).gather(1, chosen)[:, 0]
            error = ((torch.tensor(request.generated_log_probs).to(exact) - exact).abs().max() / unit).item()
        greedy = (logits.argmax(dim=1) == chosen[:, 0]).sum().item()
        found[name] = {"regret": (regret.max() / unit).item(), "log_prob": error, "greedy": greedy}
    return found


def run(name: str) -> dict:
    """Serve all requests in a case. Return the kinds of steps, and a comparison for each request."""
    options, changes, settings = CASES[name]
    model = make_model(options, changes)
    prompts = make_prompts()
    try:
        engine = make_engine(model, settings)
        finished, kinds = serve(engine, prompts, log_probs="num_speculative_tokens" not in settings)
    finally:
        InferenceMode.unset_active()
    if "enable_prefix_caching" in settings:
        kinds.add(f"{engine._prefix_cache_blocks_matched} blocks shared")
    twin = make_model(options, {})  # without graphs and draft tokens
    twin.load_state_dict(model.state_dict(), strict=False)
    requests = {number: compare(twin, prompt, finished[number]) for number, prompt in enumerate(prompts)}
    return {"steps": sorted(kinds), "requests": requests}


def run_all(names: list[str]) -> dict[str, dict]:
    """Run the cases. A case that raises an error does not stop the others."""
    findings = {}
    for name in names:
        try:
            findings[name] = run(name)
        except Exception:
            findings[name] = {"error": traceback.format_exc()}
    return findings


def fakes() -> contextlib.AbstractContextManager:
    """Return the context manager of the fakes for this device, and initialise the process group."""
    if ON_GPU:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        # Megatron-Core asks for FlashAttention, which no stick-breaking layer calls.
        return mock.patch.object(attention, "is_fa_min_version", lambda version: True)
    from support.megatron_cpu import answer_for_dynamic_inference, answer_for_gpu, answer_for_streams

    answer_for_gpu()
    answer_for_streams()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Megatron has its Triton kernels for speculative tokens in torch, too.
    for name in ("verify_speculative_tokens", "prepare_next_forward_pass"):
        setattr(text_generation_controller, name, getattr(mtp_utils_pytorch, name))
    return answer_for_dynamic_inference()


if __name__ == "__main__":
    with fakes():
        parallel_state.initialize_model_parallel()
        findings = run_all(sys.argv[3:])
    end_worker(sys.argv[1], findings)
