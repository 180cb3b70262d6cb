"""Compare layers of multi-latent attention with a float64 reference, and write the findings as JSON.

Runs on 2 ranks: `megatron_latent_attention.py OUT.json`. The reference computes a layer from the weights of its
projections, without any code of the adapter.
"""

import itertools
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.nn.functional import rms_norm

from megatron_sb import reference
from megatron_sb.megatron import shared_plans, with_stickbreaking
from megatron_sb.megatron.gates import GateLossScale
from megatron_sb.nn.gates import OPEN_GATE

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker
from support.megatron_cpu import answer_for_gpu, message, packed_params, small_config

HEADS, HIDDEN, ROWS = 4, 32, 24
SIZES = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
CHANNELS = SIZES["qk_head_dim"] + SIZES["qk_pos_emb_head_dim"]
DOCUMENTS = (0, 8, 12, 24)  # multiples of 4, for two context-parallel ranks


@dataclass(frozen=True)
class Case:
    """A layer and its inputs.

    `bounds` are the offsets of packed documents, or None for two sequences. `spread` is the standard deviation of the
    weights: large enough that a rotation would change the outputs.
    """

    changes: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    bounds: tuple | None = None
    tp: int = 1
    cp: int = 1
    scale: float = CHANNELS**-0.5
    spread: float = 0.4


YARN = {"rope_type": "yarn", "rotary_scaling_factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN_FACTOR = (0.1 * 3.6888794541139363 + 1) ** 2  # mscale^2, with ln(40)
GATES = {"forget_gate": True, "forget_gate_loss": 0.5}
RECOMPUTED = {"recompute_granularity": "selective"}
PARALLEL = {"sequence_parallel": True}
CASES = {
    "rope": Case(),
    "yarn": Case(YARN, scale=YARN_FACTOR * CHANNELS**-0.5),
    "no latent queries, no norms": Case({"q_lora_rank": None, "qk_layernorm": False}),
    "euclidean": Case(YARN, {"logits": "euclidean"}, scale=YARN_FACTOR, spread=0.05),
    "packed": Case(YARN, bounds=DOCUMENTS, scale=YARN_FACTOR * CHANNELS**-0.5),
    "packed, rows after the last document": Case(bounds=(0, 5, 5, 16)),
    "gates": Case(options=GATES),
    "gates, packed": Case(options=GATES, bounds=DOCUMENTS),
    "head vectors": Case(options={"remainder_bias": True, "head_norm": True}),
    "head vectors, packed": Case(options={"remainder_bias": True, "head_norm": True}, bounds=DOCUMENTS),
    "projections recomputed": Case({**RECOMPUTED, "recompute_modules": ["mla_up_proj"]}, GATES),
    "core recomputed": Case({**RECOMPUTED, "recompute_modules": ["core_attn"]}, bounds=DOCUMENTS),
    "TP2": Case(tp=2),
    "TP2, yarn, packed, gates": Case(YARN, GATES, DOCUMENTS, tp=2, scale=YARN_FACTOR * CHANNELS**-0.5),
    "TP2, sequence parallel": Case(PARALLEL, tp=2),
    "TP2, sequence parallel, packed, head vectors": Case(
        PARALLEL, {"remainder_bias": True, "head_norm": True}, DOCUMENTS, tp=2
    ),
    "TP2, projections recomputed": Case({**RECOMPUTED, "recompute_modules": ["mla_up_proj"]}, tp=2),
    "CP2 p2p": Case(options={"cp_comm": "p2p"}, cp=2),
    "CP2 a2a, gates": Case(options={"cp_comm": "a2a", **GATES}, cp=2),
    "CP2 all_gather, packed": Case(options={"cp_comm": "all_gather"}, bounds=DOCUMENTS, cp=2),
    "CP2 p2p, packed, yarn": Case(YARN, {"cp_comm": "p2p"}, DOCUMENTS, cp=2, scale=YARN_FACTOR * CHANNELS**-0.5),
    "CP2 whole stream": Case(options={"packing": "whole_stream"}, bounds=(0, 7, 10, 24), cp=2),
}

DECODED = {
    "plain": {},
    "gates": GATES,
    "euclidean": {"logits": "euclidean"},
    "gates, euclidean": {**GATES, "logits": "euclidean"},
}


def make_config(**changes) -> MLATransformerConfig:
    """Return the config of a layer with norms."""
    settings = {"num_query_groups": HEADS, "qk_layernorm": True, "rope_type": "rope", **SIZES}
    return small_config(MLATransformerConfig, **{**settings, **changes})


def stock_layer_spec(qk_layernorm: bool) -> ModuleSpec:
    """Return Megatron's spec of a layer without Transformer Engine."""
    return get_gpt_layer_local_spec(multi_latent_attention=True, qk_layernorm=qk_layernorm, normalization="RMSNorm")


def make_layer(config: MLATransformerConfig, **options) -> MLASelfAttention:
    """Build the attention of a layer."""
    spec = with_stickbreaking(stock_layer_spec(config.qk_layernorm), **options)
    return build_module(spec.submodules.self_attention, config=config, layer_number=1)


def randomise(layer: torch.nn.Module, case: Case) -> dict[str, Tensor]:
    """Set the weights of a layer. Return the weights of all tensor-parallel ranks together, in float64."""
    generator = torch.Generator().manual_seed(4)
    whole = {}
    for name, parameter in layer.named_parameters():
        dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
        shape = [n * case.tp if i == dim else n for i, n in enumerate(parameter.shape)]
        full = case.spread * torch.randn(shape, generator=generator)
        if "norm" in name or name == "gate_proj.bias":
            full += OPEN_GATE if name == "gate_proj.bias" else 1
        rank = parallel_state.get_tensor_model_parallel_rank()
        parameter.data.copy_(full if dim is None else full.chunk(case.tp, dim)[rank])
        whole[name] = full.double().requires_grad_()
    return whole


def of_this_rank(x: Tensor, case: Case) -> Tensor:
    """Return the rows of this context-parallel rank, zigzag: of each sequence, each document, or the whole stream."""
    rank = parallel_state.get_context_parallel_rank()
    whole = case.bounds is None or case.options.get("packing") == "whole_stream"
    bounds = (0, ROWS) if whole else case.bounds
    parts = []
    for first, end in itertools.pairwise(bounds):
        chunks = x[first:end].chunk(2 * case.cp)
        parts += [chunks[rank], chunks[2 * case.cp - 1 - rank]] if case.cp > 1 else [x[first:end]]
    if case.cp == 1:
        parts.append(x[bounds[-1] :])
    return torch.cat(parts)


def expected(hidden: Tensor, weights: dict[str, Tensor], case: Case) -> tuple[Tensor, Tensor | None]:
    """Compute a layer in float64 from its weights.

    Args:
        hidden: (s, b, HIDDEN) float64.
        weights: those of all ranks.
        case: the layer.

    Returns:
        The output (s, b, HIDDEN), and the auxiliary loss of the gates or None.
    """
    rows = hidden.shape[:2]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"linear_{name}.weight"].T

    def normalised(x: Tensor, name: str) -> Tensor:
        weight = weights.get(f"{name}_layernorm.weight")
        return x if weight is None else rms_norm(x, weight.shape, weight, 1e-5)

    if "linear_q_proj.weight" in weights:
        query = linear(hidden, "q_proj")
    else:
        query = linear(normalised(linear(hidden, "q_down_proj"), "q"), "q_up_proj")
    query = query.view(*rows, HEADS, CHANNELS)
    latent, shared = linear(hidden, "kv_down_proj").split([SIZES["kv_lora_rank"], SIZES["qk_pos_emb_head_dim"]], -1)
    key_and_value = linear(normalised(latent, "kv"), "kv_up_proj").view(*rows, HEADS, -1)
    key, value = key_and_value.split([SIZES["qk_head_dim"], SIZES["v_head_dim"]], -1)
    key = torch.cat((key, shared[:, :, None].expand(*rows, HEADS, -1)), -1)

    kwargs = {"scale": case.scale, "logits": case.options.get("logits", "dot"), "return_mass": True}
    gate, loss = None, None
    if "gate_proj.weight" in weights:
        gate = torch.sigmoid(hidden @ weights["gate_proj.weight"].T + weights["gate_proj.bias"])
        loss = -gate.log().mean()
    if case.bounds is None:
        kwargs["forget_gate"] = None if gate is None else gate.transpose(0, 1)
        out, mass = reference.stickbreaking_attention(*(x.transpose(0, 1) for x in (query, key, value)), **kwargs)
        out, mass = out.transpose(0, 1), mass.permute(2, 0, 1)
    else:
        kwargs["forget_gate"] = None if gate is None else gate[:, 0]
        qkv = (x[:, 0] for x in (query, key, value))
        out, mass = reference.stickbreaking_attention_varlen(*qkv, torch.tensor(case.bounds), **kwargs)
        out, mass = out[:, None], mass.T[:, None]
    vectors = {name.rpartition(".")[2]: x.view(HEADS, -1) for name, x in weights.items() if "core_attention" in name}
    if vectors:
        out = out + mass[..., None] * vectors["remainder_bias"]
        variance = out.var(-1, correction=0, keepdim=True)
        out = (out - out.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt() * vectors["norm_weight"]
        out = out + vectors["norm_bias"]
    return linear(out.flatten(2), "proj"), loss


def difference(out: Tensor, oracle: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest number of the oracle."""
    assert out.shape == oracle.shape, (out.shape, oracle.shape)
    return ((out.double() - oracle).abs().max() / oracle.abs().max()).item()


def compare(case: Case) -> dict[str, float]:
    """Compare the outputs and all gradients of a layer with the reference. Return the differences by name."""
    start_groups(case)
    config = make_config(
        **case.changes, tensor_model_parallel_size=case.tp, context_parallel_size=case.cp, add_bias_linear=False
    )
    layer = make_layer(config, **case.options).train()
    weights = randomise(layer, case)
    generator = torch.Generator().manual_seed(6)
    shape = (ROWS, 1 if case.bounds else 2, HIDDEN)
    hidden, factors = (torch.randn(shape, generator=generator) for _ in range(2))
    GateLossScale.per_token = 1 / (shape[0] * shape[1])

    oracle_hidden = hidden.double().requires_grad_()
    oracle, gate_loss = expected(oracle_hidden, weights, case)
    ((oracle * factors).sum() + (0.5 * gate_loss if gate_loss is not None else 0)).backward()

    def local(x: Tensor) -> Tensor:
        rows = of_this_rank(x, case)
        return (
            rows.chunk(case.tp)[parallel_state.get_tensor_model_parallel_rank()] if config.sequence_parallel else rows
        )

    mine = local(hidden).clone().requires_grad_()
    packed = packed_params(*case.bounds) if case.bounds else None
    out, _ = layer(mine, None, packed_seq_params=packed)
    (out * local(factors)).sum().backward()
    found = {
        "output": difference(out, local(oracle)),
        "hidden states": difference(mine.grad, local(oracle_hidden.grad)),
    }
    for name, parameter in layer.named_parameters():
        grad = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        oracle_grad = weights[name].grad
        if grad.shape != oracle_grad.shape:
            rank = parallel_state.get_tensor_model_parallel_rank()
            oracle_grad = oracle_grad.chunk(case.tp, parameter.partition_dim)[rank]
        found[name] = difference(grad, oracle_grad)
    shared_plans.clear()
    return found


def largest_of_both_ranks(found: dict[str, float]) -> dict[str, float]:
    """Return the larger difference of the two ranks for each name."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return {name: max(rank[name] for rank in ranks) for name in found}


def start_groups(case: Case) -> None:
    """Initialise Megatron's groups of a layout."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp, context_parallel_size=case.cp, create_gloo_process_groups=False
    )


def decoding(latent: bool, **options) -> float:
    """Return how far static inference, a prompt and then single tokens, is from the whole sequence.

    The layer has multi-latent attention, or two query heads for each KV head.
    """
    start_groups(Case())
    if latent:
        layer = make_layer(make_config(add_bias_linear=False), **options).eval()
    else:
        config = small_config(TransformerConfig, add_bias_linear=False)
        spec = with_stickbreaking(get_gpt_layer_local_spec(normalization="RMSNorm"), **options)
        layer = build_module(spec.submodules.self_attention, config=config, layer_number=1).eval()
    randomise(layer, Case(spread=0.1))
    hidden = torch.randn(ROWS, 2, HIDDEN, generator=torch.Generator().manual_seed(7))
    context = StaticInferenceContext(max_batch_size=2, max_sequence_length=ROWS)
    with torch.no_grad():
        whole, _ = layer(hidden, None)
        parts = []
        for rows in (hidden[:15], *hidden[15:].split(1)):
            parts.append(layer(rows, None, inference_context=context)[0])
            context.sequence_len_offset += len(rows)
    return difference(torch.cat(parts), whole.double())


class NoCore(torch.nn.Module):
    """A core attention without parameters, which is never called."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def same_parameters() -> bool:
    """Return whether the layer has the names and shapes of Megatron's, also in a checkpoint."""
    stock = stock_layer_spec(True).submodules.self_attention
    stock.submodules.core_attention = NoCore  # Megatron's own needs Transformer Engine
    layers = [make_layer(make_config(**YARN)), build_module(stock, config=make_config(**YARN), layer_number=1)]
    shapes = [{name: x.shape for name, x in layer.state_dict().items() if x is not None} for layer in layers]
    keys = [sorted(layer.sharded_state_dict()) for layer in layers]
    return shapes[0] == shapes[1] and keys[0] == keys[1] and len(shapes[0]) == 8


def refusals() -> dict[str, str]:
    """Return the messages of the errors for settings that latent attention does not support."""
    start_groups(Case())
    stock = stock_layer_spec(False)
    stock.submodules.self_attention.submodules.core_attention = NoCore
    everywhere, mixed = (
        with_stickbreaking(stock, layers=layers).submodules.self_attention for layers in (None, (0, 1))
    )
    cached = make_config(cache_mla_latents=True, qk_layernorm=False)
    with_l2_norm = make_config()
    with_l2_norm.qk_l2_norm = True
    calls = {
        "fused rope": lambda: make_layer(make_config(**YARN, apply_rope_fusion=True)),
        "l2 norm": lambda: make_layer(with_l2_norm),
        "channels of keys": lambda: make_layer(make_config(qk_head_dim=12)),
        "channels of values": lambda: make_layer(make_config(v_head_dim=264)),
        "euclidean": lambda: make_layer(make_config(qk_head_dim=248), logits="euclidean"),
        "dropout": lambda: make_layer(make_config(attention_dropout=0.1)),
        "cached latents": lambda: build_module(mixed, config=cached, layer_number=2),
        "cached latents of another layer": lambda: build_module(mixed, config=cached, layer_number=1),
    }
    if not hasattr(MLASelfAttention, "_resolve_qk_norm_config"):  # Megatron-Core 0.19 chooses the norms itself
        calls["norm"] = lambda: build_module(everywhere, config=make_config(), layer_number=1)
    return {name: message(call) for name, call in calls.items()}


def main(out: str) -> None:
    """Run all checks and write their findings."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    answer_for_gpu()
    # Megatron's constructor shards YaRN's angles in pinned memory, which needs a GPU.
    yarn_rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda angles, dim, group: angles
    findings = {
        "differences": {name: largest_of_both_ranks(compare(case)) for name, case in CASES.items()},
        "decoding": {
            f"{'latent' if latent else 'grouped heads'} {name}": decoding(latent, **options)
            for latent in (False, True)
            for name, options in DECODED.items()
        },
        "same parameters": same_parameters(),
        "refusals": refusals(),
    }
    end_worker(out, findings)


if __name__ == "__main__":
    main(sys.argv[1])
