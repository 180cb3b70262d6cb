"""Serve requests with Megatron-Core's dynamic inference on one CPU process, and write the errors as JSON.

`megatron_dynamic_inference.py OUT.json`. The context is Megatron's own, with fakes for the GPU that it asks for. The
loop below does what Megatron's engine does in a step.
"""

import contextlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference import utils
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron_latent_attention import make_config, make_layer

from megatron_sb import reference
from megatron_sb.megatron import core_attention, with_stickbreaking

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.megatron_cpu import (
    answer_for_dynamic_inference,
    answer_for_gpu,
    answer_for_streams,
    message,
    small_config,
)

VOCABULARY, MAX_LENGTH, BLOCK = 61, 64, 4
REQUESTS = (  # the step at which a request comes, its prompt, how many tokens to generate, tokens of the first chunk
    (0, 17, 9, None),
    (0, 3, 14, None),
    (2, 1, 6, None),
    (3, 22, 5, 13),  # the second chunk of the prompt is the next step
    (3, 8, 1, None),
    (7, 30, 4, None),
)
OPTIONS = {
    "plain": {},
    "options": {"remainder_bias": True, "head_norm": True, "reach": (0.5, 6.0), "attend_current": True},
}


def make_model(**options) -> GPTModel:
    """Return a float64 model with stick-breaking layers. Every parameter is drawn."""
    torch.manual_seed(3)
    spec = with_stickbreaking(get_gpt_layer_local_spec(), **options)
    model = GPTModel(small_config(), spec, VOCABULARY, MAX_LENGTH, position_embedding_type="none").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def make_context(**changes) -> DynamicInferenceContext:
    """Return a context for the model, with the constructor of the installed release."""
    settings = {"max_sequence_length": MAX_LENGTH, "block_size_tokens": BLOCK, "max_requests": 16, "max_tokens": 256}
    settings |= {"use_flashinfer_fused_rope": False, **changes}
    try:
        from megatron.core.inference.config import InferenceConfig
    except ImportError:  # 0.16
        sizes = {"num_layers": 2, "kv_channels": 8, "num_attention_heads": 2, "tensor_model_parallel_size": 1}
        kind = {"params_dtype": torch.float64, "buffer_size_gb": 0.001, "unified_memory_level": 0}
        return DynamicInferenceContext(**sizes, **kind, **settings)
    config = small_config(params_dtype=torch.float64)
    return DynamicInferenceContext(config, InferenceConfig(buffer_size_gb=0.001, **settings))


def make_request(number: int, prompt: list[int], new: int) -> DynamicInferenceRequest:
    """Return a request for a prompt and a number of new tokens."""
    sampling = SamplingParams(num_tokens_to_generate=new, termination_id=-1)
    return DynamicInferenceRequest(request_id=number, prompt_tokens=torch.tensor(prompt), sampling_params=sampling)


def in_inference() -> contextlib.AbstractContextManager:
    """Return the context manager with which 0.19 tells models that an engine runs them."""
    return utils.InferenceMode.active() if hasattr(utils, "InferenceMode") else contextlib.nullcontext()


def forward(model: GPTModel, context: DynamicInferenceContext) -> torch.Tensor:
    """Return the logits of the last token of each active request, (requests, vocabulary)."""
    context.initialize_attention_state()
    tokens, positions = context.current_input_and_position_ids()
    with torch.inference_mode(), in_inference():
        return model(tokens, positions, None, inference_context=context, runtime_gather_output=True)[0]


def serve(model: GPTModel) -> tuple[dict[int, list[int]], dict[int, list[torch.Tensor]], list[str]]:
    """Return the tokens of each request, the logits of each new token, and which kinds of requests each step had."""
    context = make_context()
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for _, length, _, _ in REQUESTS]
    logits, kinds, unfinished = defaultdict(list), [], {}
    for step in range(40):
        for number, request in unfinished.items():  # its next chunk
            request.remaining_prompt_tokens = request.remaining_prompt_tokens[REQUESTS[number][3] :]
            request.finished_chunk_token_count = REQUESTS[number][3]
            context.chunked_prefill_request_id = -1
            context.add_request(request)
        chunked, unfinished = set(), {}
        arrivals = [number for number, (begin, *_) in enumerate(REQUESTS) if begin == step]
        for number in sorted(arrivals, key=lambda number: REQUESTS[number][3] is not None):  # a first chunk is last
            request = make_request(number, tokens[number], REQUESTS[number][2])
            context.add_request(request, REQUESTS[number][3])
            if REQUESTS[number][3] is not None:
                context.chunked_prefill_request_id = number
                chunked, unfinished = {number}, {number: request}
        if not context.has_unfinished_requests():
            return tokens, logits, kinds
        kinds.append(f"{context.num_decode_requests} decode, {context.num_prefill_requests} prompts")
        active = context.request_ids[context.paused_request_count : context.total_request_count].tolist()
        rows = forward(model, context)[: len(active)]
        new = rows.argmax(dim=-1)
        goes_on = []
        for number, row, token in zip(active, rows, new.tolist(), strict=True):
            if number not in chunked:
                logits[number].append(row.clone())
                tokens[number].append(token)
            goes_on.append(number in chunked or len(logits[number]) < REQUESTS[number][2])
        context.update_requests(torch.tensor(goes_on, dtype=torch.uint8), new)
    raise AssertionError(f"requests {sorted(set(active))} did not end within 40 steps")


def errors(model: GPTModel) -> dict:
    """Compare the logits of all requests with a forward of each whole text with the float64 reference."""
    tokens, logits, kinds = serve(model)
    largest = {}
    with mock.patch.object(core_attention, "stickbreaking_attention", reference.stickbreaking_attention):
        for number, (_, length, new, _) in enumerate(REQUESTS):
            ids = torch.tensor(tokens[number])[None]
            with torch.no_grad():
                exact = model(ids, None, None)[0, length - 1 : -1]
            assert len(logits[number]) == new == len(exact)
            found = torch.stack(logits[number])
            largest[number] = ((found - exact).abs().max() / exact.abs().max()).item()
    return {"steps": kinds, "errors": largest}


def refusals() -> dict[str, str]:
    """Return the messages of what dynamic inference does not support."""
    context = make_context(num_cuda_graphs=2)
    context.add_request(make_request(0, [1, 2, 3], 2))
    latent, hidden = make_layer(make_config()), torch.randn(3, 1, 32)
    return {
        "forget gates": message(lambda: forward(make_model(forget_gate=True), context)),
        "euclidean": message(lambda: forward(make_model(logits="euclidean"), context)),
        "latent": message(lambda: latent(hidden, None, inference_context=context)),
        "graph of prompts": message(lambda: forward(make_model(), context)),
    }


if __name__ == "__main__":
    answer_for_gpu()
    answer_for_streams()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with answer_for_dynamic_inference():
        findings = {name: errors(make_model(**options)) for name, options in OPTIONS.items()}
        findings["refusals"] = refusals()
    Path(sys.argv[1]).write_text(json.dumps(findings))
