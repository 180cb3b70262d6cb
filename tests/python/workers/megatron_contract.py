"""Check StickBreakingCoreAttention in models and process groups, and write the findings as JSON.

Runs on 2 ranks: `megatron_contract.py OUT.json`.
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.utils.checkpoint import checkpoint

from megatron_sb.megatron import StickBreakingCoreAttention, plans, shared_plans, with_stickbreaking
from megatron_sb.megatron.spec import stickbreaking_layer_spec
from megatron_sb.ops.context_parallel import shard_sequence

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker
from support.megatron_cpu import (
    answer_for_gpu,
    core_attention_arguments,
    message,
    packed_params,
    small_config,
)

VOCAB_SIZE = 32
THRESHOLD = 0.5  # of clipped logits


def make_model(spec, position_embedding_type="none", **changes) -> GPTModel:
    """Build a GPTModel from `spec` with a context of 32 tokens."""
    torch.manual_seed(3)
    return GPTModel(small_config(**changes), spec, VOCAB_SIZE, 32, position_embedding_type=position_embedding_type)


def make_core(cp_group, cp_comm_type=None, **settings) -> StickBreakingCoreAttention:
    """Build a core attention over `cp_group`, without a model."""
    config = small_config(**settings)
    return StickBreakingCoreAttention(**core_attention_arguments(config, cp_group, cp_comm_type=cp_comm_type))


def make_qkv(*rows: int) -> list[torch.Tensor]:
    """Draw q, k and v with 4 heads, 2 KV heads and 8 channels, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*rows, heads, 8, generator=generator) for heads in (4, 2, 2)]


def refusals(world) -> dict[str, str]:
    """Return the messages of errors that need a built model or a process group."""
    tokens = torch.randint(VOCAB_SIZE, (1, 16))
    rope = make_model(with_stickbreaking(get_gpt_layer_local_spec()), position_embedding_type="rope")
    overwritten = with_stickbreaking(get_gpt_layer_local_spec())
    overwritten.submodules.self_attention.submodules.core_attention = DotProductAttention
    sequence = make_qkv(8, 1)
    indivisible = packed_params(0, 8, 14)
    learned = {"position_embedding_type": "learned_absolute"}
    shared = small_config()  # of a softmax model with learned positions, and then of a stick-breaking one without
    GPTModel(shared, get_gpt_layer_local_spec(), VOCAB_SIZE, 32, **learned)
    without_positions = (shared, with_stickbreaking(get_gpt_layer_local_spec()), VOCAB_SIZE, 32)
    return {
        "learned positions": message(lambda: make_model(with_stickbreaking(get_gpt_layer_local_spec()), **learned)),
        "learned positions of softmax": message(lambda: GPTModel(*without_positions, position_embedding_type="none")),
        "rope": message(lambda: rope(tokens, None, None)),
        "attention backend local": message(lambda: make_model(overwritten)),
        "qk layernorm": message(lambda: make_model(stickbreaking_layer_spec, qk_layernorm=True)),
        "qk l2 norm": message(lambda: make_model(stickbreaking_layer_spec, qk_l2_norm=True)),
        "experts": message(lambda: make_model(stickbreaking_layer_spec, num_moe_experts=2, add_bias_linear=False)),
        "a2a": message(
            lambda: make_core(world, "a2a")(sequence[0][:, :, :3], *(x[:, :, :1] for x in sequence[1:]), None)
        ),
        "a2a+p2p": message(lambda: make_core(world, "a2a+p2p")(*sequence, None)),
        "indivisible": message(lambda: make_core(world)(*make_qkv(7), None, packed_seq_params=indivisible)),
        "odd sequence": message(lambda: make_core(world)(*make_qkv(7, 1), None)),
        "different documents": message(
            lambda: make_core(world)(
                *make_qkv(4),
                None,
                packed_seq_params=packed_params(0, 4, 8, cu_seqlens_kv=torch.tensor([0, 8, 8], dtype=torch.int32)),
            )
        ),
        "local_cp_size": message(
            lambda: make_core(world)(*make_qkv(8), None, packed_seq_params=packed_params(0, 8, local_cp_size=2))
        ),
    }


def plan_counts(world) -> dict[str, int]:
    """Count the plans that 24 layers make in forward and backward."""
    made = []
    real = plans.ContextParallelPlan

    def counting_plan(*args, **kwargs):
        made.append(kwargs)
        return real(*args, **kwargs)

    def count(batches) -> int:
        shared_plans.clear()
        made.clear()
        layers = [make_core(world, mode) for mode in ("p2p", "all_gather")] * 12
        for params in batches:
            outputs = []
            for layer in layers:
                q, k, v = (x.requires_grad_() for x in make_qkv(*((8,) if params else (8, 1))))
                outputs.append(layer(q, k, v, None, packed_seq_params=params))
            torch.stack(outputs).sum().backward()
        return len(made)

    def one_in_two_versions():
        params = packed_params(0, 8, 16)
        yield params
        params.cu_seqlens_q.copy_(torch.tensor([0, 4, 16], dtype=torch.int32))
        yield params

    plans.ContextParallelPlan = counting_plan
    counts = {
        "three sequences": count([None, None, None]),
        "three packed batches": count([packed_params(0, 8, 16), packed_params(0, 4, 16), packed_params(0, 8, 16)]),
        "one packed batch three times": count([packed_params(0, 8, 16)] * 3),
        "offsets changed in place": count(one_in_two_versions()),
    }
    plans.ContextParallelPlan = real
    return counts


def differences(world) -> dict[str, float]:
    """Return the largest absolute differences between two computations of the same output."""
    q, k, v = make_qkv(8)
    over_two, alone = make_core(world), make_core(None)
    bounds = (0, 8, 16)
    plain = over_two(q, k, v, None, packed_seq_params=packed_params(*bounds))
    overridden = alone(q, k, v, None, packed_seq_params=packed_params(*bounds, cp_group=world, local_cp_size=2))
    local = alone(q, k, v, None, packed_seq_params=packed_params(0, 8))
    turned_off = over_two(q, k, v, None, packed_seq_params=packed_params(0, 8, local_cp_size=1))
    one_of_two = over_two(q, k, v, None, packed_seq_params=packed_params(0, 8))

    inputs = [[x.clone().requires_grad_() for x in make_qkv(8, 2)] for _ in range(2)]
    weights = torch.linspace(-1, 1, 8 * 2 * 32).view(8, 2, 32)
    (over_two(*inputs[0], None) * weights).sum().backward()
    recomputed = checkpoint(lambda *qkv: over_two(*qkv, None), *inputs[1], use_reentrant=False)
    (recomputed * weights).sum().backward()
    return {
        "cp_group of packed_seq_params": (plain - overridden).abs().max().item(),
        "local_cp_size=1": (local - turned_off).abs().max().item(),
        # Both ranks together have 16 rows. The first 8 rows are a document. Each rank has 4 of these and 4 others.
        "rows of no document": one_of_two[4:].abs().max().item(),
        "largest logits": largest_logits(world),
        "recomputation": torch.stack([(a.grad - b.grad).abs().max() for a, b in zip(*inputs, strict=True)])
        .max()
        .item(),
    }


def largest_logits(world) -> float:
    """Return the difference between two ranks and one in the largest logits of sequences and of documents."""
    errors = []
    for rows, params in (((16, 2), None), ((16,), packed_params(0, 4, 16))):
        whole = make_qkv(*rows)
        alone, over_two = (make_core(group, qk_clip=True) for group in (None, world))
        alone(*whole, None, packed_seq_params=params)
        cu_seqlens = None if params is None else params.cu_seqlens_q
        over_two(*(shard_sequence(x, world, 0, cu_seqlens=cu_seqlens) for x in whole), None, packed_seq_params=params)
        largest = over_two.current_max_attn_logits
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # as Megatron does
        errors.append((largest - alone.current_max_attn_logits).abs().max())
    return torch.stack(errors).max().item()


def clipped_weights() -> dict[str, list[float]]:
    """Return the largest logit of each KV head in the first layer, before and after Megatron clips its weights."""
    spec = with_stickbreaking(get_gpt_layer_local_spec())
    model = make_model(spec, qk_clip=True, qk_clip_threshold=THRESHOLD, init_method_std=0.3)
    attention, found = model.decoder.layers[0].self_attention, {}
    for name in ("before", "after"):
        model(torch.arange(16)[None], None, None)
        found[name] = attention.core_attention.current_max_attn_logits.view(2, -1).amax(1).tolist()
        attention.clip_qk()
    return found


def bare_spec() -> dict:
    """Run forward and backward of a model with the spec object that users pass as `--spec`."""
    model = make_model(stickbreaking_layer_spec)
    loss = model(torch.arange(16)[None], None, None, labels=torch.arange(16)[None]).mean()
    loss.backward()
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    return {
        "loss": loss.item(),
        "gradients are finite": all(p.grad.isfinite().all().item() for p in model.parameters()),
        "cores": [type(core).__name__ for core in cores],
        "checkpoint keys of cores": [key for key in model.sharded_state_dict() if "core_attention" in key],
    }


def head_vectors(folder: Path) -> dict:
    """Save a model with remainder bias and head norm on two tensor-parallel ranks; load it on one and on two."""

    def build(num_ranks: int) -> GPTModel:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(num_ranks)
        spec = with_stickbreaking(get_gpt_layer_local_spec(), remainder_bias=True, head_norm=True)
        return make_model(spec, tensor_model_parallel_size=num_ranks)

    def of_cores(model) -> dict[str, torch.Tensor]:
        return {name: x.detach() for name, x in model.named_parameters() if "core_attention" in name}

    def whole(model) -> dict[str, torch.Tensor]:
        group = parallel_state.get_tensor_model_parallel_group()
        parts = {name: [torch.empty_like(x) for _ in range(group.size())] for name, x in of_cores(model).items()}
        for name, x in of_cores(model).items():
            dist.all_gather(parts[name], x, group)
        return {name: torch.cat(part) for name, part in parts.items()}

    def loss(model) -> float:
        tokens = torch.arange(16)[None]
        return model(tokens, None, None, labels=tokens + 1).mean().item()

    def loaded(num_ranks: int) -> GPTModel:
        model = build(num_ranks)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))
        return model

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    saved = build(2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for x in of_cores(saved).values():
        x.add_(torch.randn(x.shape, generator=generator))
    expected, losses = whole(saved), {"saved": loss(saved)}
    dist_checkpointing.save(saved.sharded_state_dict(), str(folder))
    same = {}
    for name, num_ranks in {"one rank": 1, "two ranks again": 2}.items():
        model = loaded(num_ranks)
        losses[name] = loss(model)
        same[name] = all(torch.equal(x, expected[key]) for key, x in whole(model).items())
    lengths = {name: len(x) for name, x in of_cores(saved).items()}
    return {"local lengths": lengths, "whole": same, "loss": losses}


def main(out: str) -> None:
    """Run all checks and write their findings."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    answer_for_gpu()
    parallel_state.initialize_model_parallel()
    world = dist.group.WORLD
    findings = {
        "differences": differences(world),
        "plans": plan_counts(world),
        "bare spec": bare_spec(),
        "clipped weights": clipped_weights(),
        "refusals": refusals(world),
        "head vectors": head_vectors(Path(out).parent / "checkpoint"),
    }
    shared_plans.clear()
    end_worker(out, findings)


if __name__ == "__main__":
    main(sys.argv[1])
