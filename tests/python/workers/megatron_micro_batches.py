"""Train on packed micro-batches that need many context-parallel plans, and write how losses and gradients differ.

Runs on 4 CPU ranks: `megatron_micro_batches.py OUT.json`. All results are compared with one rank, which has all layers
and whole documents.
"""

import math
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_sb.megatron import plans, shared_plans, with_stickbreaking

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from support.launch import end_worker

VOCABULARY, LAYERS, STAGES = 32, 4, 2
# Lengths of the documents in each micro-batch. Pipeline stages exchange tensors of one size, so the sums are equal.
LENGTHS = ((8, 24, 16), (48,), (16, 8, 8, 16), (24, 24), (8, 40))
# The groups of ranks that share each micro-batch of hybrid context parallelism.
SPLITS = (((0, 1, 2, 3),), ((0, 1), (2,), (3,)), ((0,), (1,), (2, 3)), ((0, 1), (2, 3)), ((0, 1, 2, 3),))


def stream(lengths: tuple, seed: int, rank: int = 0, size: int = 1, **params) -> dict:
    """Return the rows of one of `size` ranks that share a packed stream, by Megatron's zigzag of each document."""
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(VOCABULARY, (length + 1,), generator=generator) for length in lengths]

    def rows(document: torch.Tensor) -> torch.Tensor:
        chunks = document.chunk(2 * size)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))

    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        **params,
    )
    tokens, labels = (torch.cat([rows(x) for x in parts])[None] for parts in zip(*_shifted(documents), strict=True))
    return {"tokens": tokens, "labels": labels, "packed": packed}


def _shifted(documents: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(document[:-1], document[1:]) for document in documents]


def build(weights: dict | None = None, **changes) -> GPTModel:
    """Build the layers of this rank's pipeline stage. weights: those of all layers."""
    config = megatron_cpu.small_config(
        num_layers=LAYERS,
        normalization="RMSNorm",
        init_method_std=0.3,
        pipeline_dtype=torch.float32,
        calculate_per_token_loss=True,
        **changes,
    )
    torch.manual_seed(1)
    model = GPTModel(
        config,
        with_stickbreaking(get_gpt_layer_local_spec(normalization="RMSNorm"), remainder_bias=True),
        VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="none",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    for name, parameter in model.named_parameters():
        if weights is not None:
            parameter.data.copy_(weights[full_name(name)])
    return model


def full_name(name: str) -> str:
    """Return the name of a parameter of a stage in a model with all layers. Each stage counts its layers from 0."""
    head, found, tail = name.partition("decoder.layers.")
    if not found:
        return name
    layer, _, rest = tail.partition(".")
    first = parallel_state.get_pipeline_model_parallel_rank() * LAYERS // STAGES
    return f"{head}{found}{int(layer) + first}.{rest}"


def losses(model: GPTModel, batch: dict) -> torch.Tensor:
    """Return the losses of the tokens."""
    return model(batch["tokens"], None, None, labels=batch["labels"], packed_seq_params=batch["packed"])


def reference(streams: list[dict], weights: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the sum of all losses, and the gradients. One rank computes them without recomputation."""
    model = build(weights)
    total = sum(losses(model, batch).sum() for batch in streams)
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def through_pipeline(weights: dict, expected: tuple, capacity: int) -> dict:
    """Train with recomputed layers and a cache of `capacity` plans. Return the differences and the number of plans."""
    model = build(
        weights,
        pipeline_model_parallel_size=STAGES,
        context_parallel_size=2,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    rank = parallel_state.get_context_parallel_rank()
    batches = iter([stream(lengths, seed, rank, 2) for seed, lengths in enumerate(LENGTHS)])
    made, plan = [], plans.ContextParallelPlan
    plans.ContextParallelPlan = lambda *args, **kwargs: made.append(1) or plan(*args, **kwargs)
    shared_plans.clear()
    shared_plans.capacity = capacity

    def forward_step(iterator, stage):
        batch = next(iterator)

        def sums(x):
            return x.sum(), torch.tensor(x.numel(), dtype=torch.int), {"loss": x.detach().sum()}

        return losses(stage, batch), sums

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=len(LENGTHS),
        seq_length=sum(LENGTHS[0]),
        micro_batch_size=1,
    )
    plans.ContextParallelPlan = plan
    total = torch.tensor(sum(output["loss"].item() for output in outputs))
    gradients = {full_name(name): parameter.grad for name, parameter in model.named_parameters()}
    everyone = differences(total, gradients, parallel_state.get_context_parallel_group(), expected)
    return {**everyone, "plans": len(made)}


def with_hybrid_context_parallelism(weights: dict, streams: list[dict], expected: tuple) -> dict[str, float]:
    """Train on micro-batches that differ in the ranks that share them."""
    model = build(weights)
    total, rank = torch.zeros(()), dist.get_rank()
    for seed, groups in enumerate(SPLITS):
        for place, members in enumerate(groups):
            if rank in members:
                size = len(members)
                params = {"local_cp_size": size, "cp_group": hybrid_group(size)}
                loss = losses(model, stream(*streams[seed][place], members.index(rank), size, **params)).sum()
                loss.backward()
                total += loss.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return differences(total, gradients, dist.group.WORLD, expected)


def hybrid_group(size: int) -> dist.ProcessGroup | None:
    """Return Megatron's group of this rank with `size` ranks. One rank needs none."""
    if size == 1:
        return None
    if size == dist.get_world_size():
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_hybrid_data_context_parallel_groups(group_size=size)


def differences(total: torch.Tensor, gradients: dict, group, expected: tuple) -> dict[str, float]:
    """Sum a loss and gradients over a group. Return the largest relative difference to what is expected on any rank."""
    expected_loss, expected_gradients = expected
    dist.all_reduce(total, group=group)
    errors = []
    for name, gradient in gradients.items():
        dist.all_reduce(gradient, group=group)
        errors.append(((gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()).item())
    assert all(map(math.isfinite, errors)), errors  # a maximum would lose a NaN
    is_last = parallel_state.is_pipeline_last_stage()
    loss = abs(total.item() / expected_loss - 1) if is_last else 0.0
    assert math.isfinite(loss)
    found = torch.tensor([loss, max(errors)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"loss": found[0].item(), "gradients": found[1].item()}


def main(out: str) -> None:
    """Write all findings."""
    torch.set_num_threads(1)
    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, hybrid_context_parallel=True)
    weights = {name: parameter.detach() for name, parameter in build().named_parameters()}
    whole = reference([stream(lengths, seed) for seed, lengths in enumerate(LENGTHS)], weights)

    # Groups of one micro-batch have other documents.
    arguments = [
        [(LENGTHS[(seed + place) % len(LENGTHS)], 10 * seed + place) for place in range(len(groups))]
        for seed, groups in enumerate(SPLITS)
    ]
    of_groups = reference([stream(*each) for groups in arguments for each in groups], weights)
    found = {"hybrid context parallelism": with_hybrid_context_parallelism(weights, arguments, of_groups)}

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES, context_parallel_size=2, create_gloo_process_groups=False
    )
    with megatron_cpu.TensorsOnTheCpu():
        found["pipeline"] = {capacity: through_pipeline(weights, whole, capacity) for capacity in (16, 1)}
    shared_plans.clear()
    end_worker(out, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
