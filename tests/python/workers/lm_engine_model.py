"""Compare a patched lm-engine's model with the float64 reference, and write the errors as JSON.

Runs on CPU ranks: `lm_engine_model.py OUT.json SOURCES one|context|tensor`. SOURCES is the patched checkout.
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_sb import checkpoints, reference

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker

BATCH, ROWS, VOCABULARY = 2, 48, 64
LENGTHS = (30, 48, 18)  # documents of the packed batch, BATCH * ROWS tokens
REACH = (0.5, 6.0)
PADDING = 11  # left of the first row of the padded batch


def config_of(**options):
    """Return the configuration of a model with two layers. Of 8 query heads, 2 read each KV head."""
    from lm_engine.models import GPTBaseConfig

    mixer = {"sequence_mixer_type": "stickbreaking_attention", "num_attention_heads": 8, "num_key_value_heads": 4}
    mlp = {"mlp_type": "MLP", "activation_function": "swiglu", "add_bias": False, "intermediate_size": 64}
    multipliers = dict.fromkeys(("rope_scaling", "m_emb", "m_width", "m_residual"))
    return GPTBaseConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=ROWS,
        hidden_size=64,
        num_layers=2,
        normalization_function="rmsnorm",
        initializer_range=0.3,
        init_method="normal",
        embedding_init_method="normal",
        use_depth_scaled_init=False,
        position_embedding_type="nope",
        rope_theta=10000,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        sequence_mixer_blocks=[mixer | options] * 2,
        mlp_blocks=[mlp] * 2,
        **multipliers,
    )


def make_model(config, weights: dict[str, Tensor] | None = None, **options):
    """Return a float64 model. Without weights, every parameter is drawn, also the vectors that start at 0 or 1."""
    from lm_engine.hf_adapter import get_causal_lm_class

    model = get_causal_lm_class(config.model_type)(config, **options).double()
    if weights is None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        return model
    state = {
        name: distribute_tensor(weights[name], parameter.device_mesh, parameter.placements)
        if isinstance(parameter, DTensor)
        else weights[name]
        for name, parameter in model.named_parameters()
    }
    model.load_state_dict(state)
    return model


def naive_head_output(o, mass, remainder_bias, norm_weight, norm_bias, *, eps):
    """Compute remainder and head norm as in their formula."""
    x = o if remainder_bias is None else o + mass.transpose(-1, -2)[..., None] * remainder_bias.view(o.shape[-2:])
    if norm_weight is None:
        return x
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + eps).sqrt()
    return x * norm_weight.view(o.shape[-2:]) + norm_bias.view(o.shape[-2:])


def exact_results(model, ids: Tensor, d_logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of one rank without packing, and the gradients of all parameters, with the reference."""
    import lm_engine.modeling_utils.sequence_mixer_blocks.stickbreaking_attention.module as mixers
    from lm_engine.parallel import ProcessGroupManager

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mixers, "stickbreaking_attention", reference.stickbreaking_attention))
        stack.enter_context(mock.patch.object(mixers, "head_output", naive_head_output))
        if ProcessGroupManager.is_initialized():
            stack.enter_context(ProcessGroupManager.set_dummy_context_parallel_world_size(1))
            stack.enter_context(ProcessGroupManager.set_dummy_tensor_parallel_world_size(1))
        return results(model, d_logits, lambda: model(ids).logits)


def results(model, d_logits: Tensor, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and the gradients of all parameters."""
    model.zero_grad()
    logits = forward()
    logits.backward(d_logits)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return logits.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g.clone() for n, g in gradients.items()}


def errors(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """Return the largest error of the logits and of each gradient, relative to the largest expected element."""
    pairs = {"logits": (found[0], expected[0])} | {name: (found[1][name], expected[1][name]) for name in expected[1]}
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


def packed_arguments(offsets: list[int]) -> dict:
    """Return the keyword arguments of a model without padding."""
    from lm_engine.modeling_utils import AttentionMaskInfo, PositionInfo

    lengths = [end - begin for begin, end in pairwise(offsets)]
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.tensor(offsets, dtype=torch.int32)
    info = AttentionMaskInfo(cu_seqlens=documents, max_seqlen=max(lengths))
    return {"attention_mask_info": info, "position_info": PositionInfo(position_ids=positions)}


def packed_and_exact(weights, config, ids: Tensor, d_logits: Tensor, **options) -> dict[str, float]:
    """Compare a packed batch with its documents one by one. `options` are those of the packed model."""
    from lm_engine.parallel import ProcessGroupManager

    packed = make_model(config, weights, use_padding_free_transformer=True, **options)
    ids, d_logits = ids.flatten(), d_logits.flatten(0, 1)
    offsets = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    found = results(packed, d_logits, lambda: packed(ids, **packed_arguments(offsets)).logits)
    with ExitStack() as stack:
        if ProcessGroupManager.is_initialized():
            stack.enter_context(ProcessGroupManager.set_dummy_tensor_parallel_world_size(1))
        model = make_model(config, weights)
    documents = [
        exact_results(model, ids[None, begin:end], d_logits[None, begin:end]) for begin, end in pairwise(offsets)
    ]
    logits = torch.cat([logits[0] for logits, _ in documents])
    gradients = {name: sum(gradients[name] for _, gradients in documents) for name in documents[0][1]}
    return errors(found, (logits, gradients))


def on_one_rank(config, weights, ids: Tensor, d_logits: Tensor, folder: Path) -> dict[str, dict[str, float]]:
    """Check several batches, decoding, a model without options, and the saved folder in this package."""
    from lm_engine.generation_cache import GenerationCache
    from lm_engine.hf_adapter import LLMAdapter_HF
    from lm_engine.modeling_utils import AttentionMaskInfo

    model = make_model(config, weights)
    exact = exact_results(model, ids, d_logits)
    found = {"dense": errors(results(model, d_logits, lambda: model(ids).logits), exact)}
    found["packed"] = packed_and_exact(weights, config, ids, d_logits)

    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    alone = exact_results(model, ids[:1, PADDING:], d_logits[:1, PADDING:])[0]
    expected = torch.cat([alone[0], exact[0][1]])
    cache, steps = GenerationCache(), []
    for begin, end in ((0, 40), (40, 41), (41, ROWS)):  # a prompt, one token, several tokens
        info = AttentionMaskInfo(attention_mask=mask[:, :end])
        with torch.no_grad():
            steps.append(model(ids[:, begin:end], cache_params=cache, attention_mask_info=info).logits)
    for name, logits in (
        ("padded", model(ids, attention_mask_info=AttentionMaskInfo(attention_mask=mask)).logits),
        ("decoded", torch.cat(steps, dim=1)),
    ):
        found[name] = errors((torch.cat([logits[0, PADDING:], logits[1]]), {}), (expected, {}))

    plain = make_model(config_of(remainder_bias=False, head_norm=False))
    expected = exact_results(plain, ids, d_logits)
    found["without options"] = errors(results(plain, d_logits, lambda: plain(ids).logits), expected)

    LLMAdapter_HF(model).save_pretrained(str(folder))
    ours = checkpoints.load(folder).double()
    with torch.no_grad():
        found["loaded by this package"] = errors((ours(ids).logits, {}), (exact[0], {}))
    return found


def with_context_parallelism(config, weights, ids: Tensor, d_logits: Tensor) -> dict[str, dict[str, float]]:
    """Check both of its layouts. Gradients are summed over the ranks."""
    from lm_engine.enums import ContextParallelLoadBalancerMethod
    from lm_engine.parallel import ProcessGroupManager, manager, prepare_context_parallel_input

    ProcessGroupManager(context_parallel_world_size=2)
    model = make_model(config, weights)
    exact = exact_results(model, ids, d_logits)
    found = {}
    for method in (ContextParallelLoadBalancerMethod.headtail, None):
        manager._CONTEXT_PARALLEL_LOAD_BALANCING_METHOD = method
        local_ids, local_d, local_exact = prepare_context_parallel_input((ids, d_logits, exact[0]))
        logits, gradients = results(model, local_d, lambda ids=local_ids: model(ids).logits)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        found[getattr(method, "value", "contiguous")] = errors((logits, gradients), (local_exact, exact[1]))
    return found


def with_tensor_parallelism(config, weights, ids: Tensor, d_logits: Tensor) -> dict[str, dict[str, float]]:
    """Check dense and packed batches, both with and without sequence parallelism."""
    from lm_engine.parallel import ProcessGroupManager

    ProcessGroupManager(tensor_parallel_world_size=2)
    with ProcessGroupManager.set_dummy_tensor_parallel_world_size(1):
        whole = make_model(config, weights)
    exact = exact_results(whole, ids, d_logits)
    found = {}
    for sequence_parallel in (False, True):
        options = {"sequence_parallel": sequence_parallel}
        model = make_model(config, weights, **options)
        assert all(isinstance(parameter, DTensor) for parameter in model.transformer.h["0"].sequence_mixer.parameters())
        name = f"sequence_parallel={sequence_parallel}"
        found[f"dense, {name}"] = errors(results(model, d_logits, lambda model=model: model(ids).logits), exact)
        found[f"packed, {name}"] = packed_and_exact(weights, config, ids, d_logits, **options)
    return found


def main() -> None:
    """Run the checks of the arguments."""
    out, sources, kind = sys.argv[1:]
    sys.path.insert(0, sources)
    torch.manual_seed(3)
    config = config_of(reach=REACH)
    weights = dict(make_model(config).state_dict())
    ids = torch.randint(VOCABULARY, (BATCH, ROWS))
    d_logits = torch.randn(BATCH, ROWS, VOCABULARY, dtype=torch.float64)
    if kind == "context":
        end_worker(out, with_context_parallelism(config, weights, ids, d_logits))
    if kind == "tensor":
        end_worker(out, with_tensor_parallelism(config, weights, ids, d_logits))
    Path(out).write_text(json.dumps(on_one_rank(config, weights, ids, d_logits, Path(out).with_suffix(""))))


if __name__ == "__main__":
    main()
