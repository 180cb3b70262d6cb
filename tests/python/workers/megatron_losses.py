"""Train a small GPTModel with stick-breaking attention in many parallel layouts and write the losses as JSON.

Runs on 4 ranks: `megatron_losses.py OUT.json`. All runs of a family start from the same weights and have the same
documents. In the references (`alone`), rank 0 does all the work itself.
"""

import itertools
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_sb.megatron import shared_plans, with_stickbreaking
from megatron_sb.megatron.gates import GateLossScale

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from support.launch import end_worker

NUM_STEPS = 6
VOCAB_SIZE = 64
NUM_DOCUMENTS = 8
EQUAL_LENGTHS = (32,) * 4
# Lengths in a packed stream, which pads them to multiples of 4 for two context-parallel ranks.
UNEQUAL_LENGTHS = (5, 16, 3, 12)
PADDED_MULTIPLE = 4


@dataclass(frozen=True)
class Run:
    """A training run. `form`: "batch" (sbhd, equal lengths), "single" (sbhd, one document) or "packed" (thd)."""

    name: str
    form: str = "batch"
    lengths: tuple = EQUAL_LENGTHS
    alone: bool = False
    tp: int = 1
    cp: int = 1
    ep: int = 1
    model: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    data_layout: str = "zigzag"
    one_cu_seqlens: bool = True


MULTI_QUERY = {"num_query_groups": 1}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "moe_ffn_hidden_size": 48,
    "add_bias_linear": False,
}
RING = {"cp_comm_type": "p2p"}
GATHER = {"cp_comm_type": "all_gather"}
HEADS = {"cp_comm_type": "a2a"}
HIERARCHY = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
SEQUENCE_PARALLEL = {"sequence_parallel": True}
PACKED = {"form": "packed", "lengths": UNEQUAL_LENGTHS}
HEAD_VECTORS = {"options": {"remainder_bias": True, "head_norm": True}}
GATES = {"options": {"forget_gate": True, "forget_gate_loss": 1.0, "logits": "euclidean", "reach": (0.5, 6.0)}}
LATENT = {
    "num_query_groups": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "qk_layernorm": True,
}

RUNS = (
    Run("batch/1 rank", alone=True),
    Run("batch/TP2", tp=2),
    Run("batch/CP2 p2p", cp=2, model=RING),
    Run("batch/CP2 all_gather", cp=2, model=GATHER),
    Run("batch/CP2 a2a", cp=2, model=HEADS),
    Run("batch/CP4 a2a+p2p", cp=4, model=HIERARCHY),
    Run("batch/CP2 contiguous p2p", cp=2, model=RING, options={"cp_layout": "contiguous"}, data_layout="contiguous"),
    Run("batch/TP2 CP2", tp=2, cp=2),
    Run("batch/TP2 CP2 sequence parallel", tp=2, cp=2, model=SEQUENCE_PARALLEL),
    # Shows that a wrong order of keys changes the losses: the model assumes zigzag, the data are contiguous shards.
    Run("batch/misplaced CP2", cp=2, data_layout="contiguous"),
    Run("multi-query/1 rank", alone=True, model=MULTI_QUERY),
    Run("multi-query/TP2 CP2", tp=2, cp=2, model=MULTI_QUERY),
    Run("head vectors/1 rank", alone=True, **HEAD_VECTORS),
    Run("head vectors/TP2 sequence parallel", tp=2, model=SEQUENCE_PARALLEL, **HEAD_VECTORS),
    Run("head vectors/TP2 CP2", tp=2, cp=2, **HEAD_VECTORS),
    Run("gates/1 rank", alone=True, **GATES),
    Run("gates/TP2 CP2 sequence parallel", tp=2, cp=2, model=SEQUENCE_PARALLEL, **GATES),
    Run("latent/1 rank", alone=True, model=LATENT),
    Run("latent/TP2", tp=2, model=LATENT),
    Run("latent/TP2 CP2 sequence parallel", tp=2, cp=2, model=LATENT | SEQUENCE_PARALLEL),
    Run("packed/1 rank", form="single", lengths=UNEQUAL_LENGTHS, alone=True),
    Run("packed/1 rank packed", alone=True, **PACKED),
    Run("packed/TP2", tp=2, **PACKED),
    Run("packed/CP2 p2p", cp=2, model=RING, **PACKED),
    Run("packed/TP2 CP2", tp=2, cp=2, one_cu_seqlens=False, **PACKED),
    Run("packed/CP2 whole stream", cp=2, options={"packing": "whole_stream"}, data_layout="whole_stream", **PACKED),
    Run("experts/1 rank", alone=True, model=EXPERTS),
    Run("experts/EP2", ep=2, model=EXPERTS),
    Run("experts/CP2 EP2 p2p", cp=2, ep=2, model=EXPERTS | RING),
    Run("experts/TP2 CP2 EP2", tp=2, cp=2, ep=2, model=EXPERTS | SEQUENCE_PARALLEL),
)


def layout(run: Run) -> tuple:
    """Return what determines the process groups of a run."""
    return run.tp, run.cp, run.ep, *run.model.get("hierarchical_context_parallel_sizes", ())


def start_groups(tp: int, cp: int, ep: int, *hierarchy: int) -> None:
    """Create the process groups of a layout."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        hierarchical_context_parallel_sizes=[*hierarchy] or None,
        create_gloo_process_groups=False,  # all groups use gloo
    )


def build(run: Run) -> GPTModel:
    """Build the model in this run's layout, with weights to be replaced."""
    is_latent = "kv_lora_rank" in run.model
    config = megatron_cpu.small_config(
        MLATransformerConfig if is_latent else TransformerConfig,
        **{
            "ffn_hidden_size": 64,
            "normalization": "RMSNorm",
            "init_method_std": 0.3,
            "tensor_model_parallel_size": run.tp,
            "context_parallel_size": run.cp,
            "expert_model_parallel_size": run.ep,
            "expert_tensor_parallel_size": 1,
            **run.model,
        },
    )
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        multi_latent_attention=is_latent,
        qk_layernorm=config.qk_layernorm,
    )
    torch.manual_seed(1)
    spec = with_stickbreaking(layer, **run.options)
    return GPTModel(config, spec, VOCAB_SIZE, max_sequence_length=64, position_embedding_type="none")


def full_name(name: str, run: Run) -> str:
    """Return the name of a local parameter in the one-rank model. Each rank numbers its local experts from 0."""
    head, marker, tail = name.partition("local_experts.")
    if not marker:
        return name
    index, _, rest = tail.partition(".")
    num_local = run.model["num_moe_experts"] // run.ep
    return f"{head}{marker}{int(index) + num_local * parallel_state.get_expert_model_parallel_rank()}.{rest}"


def load(model: GPTModel, run: Run, full: dict[str, torch.Tensor]) -> None:
    """Copy this rank's share of the full weights."""
    for name, param in model.named_parameters():
        weight = full[full_name(name, run)]
        if weight.shape != param.shape:
            weight = weight.chunk(run.tp, param.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]
        param.data.copy_(weight)


def gather(model: GPTModel, run: Run) -> list[dict[str, torch.Tensor]]:
    """Gather the full weights of every data- and context-parallel replica."""
    mine = {full_name(name, run): (p.data, getattr(p, "partition_dim", -1)) for name, p in model.named_parameters()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    replicas = []
    for first in range(0, len(everyone), run.tp):  # tensor-parallel ranks are consecutive
        members = everyone[first : first + run.tp]
        replicas.append({})
        for name in set().union(*members):
            shards, dims = zip(*(member[name] for member in members if name in member), strict=True)
            if run.tp > 1 and dims[0] >= 0 and "local_experts" not in name:
                replicas[-1][name] = torch.cat(shards, dims[0])
            else:
                replicas[-1][name] = shards[0]
                assert all(torch.equal(shard, shards[0]) for shard in shards), name
    return replicas


def assert_same_start(model: GPTModel, run: Run, full: dict[str, torch.Tensor]) -> None:
    """Assert that each replica holds a part of the full weights, and that all replicas together hold all of them."""
    replicas = gather(model, run)
    for replica in replicas:
        for name, weight in replica.items():
            assert torch.equal(weight, full[name]), f"{run.name}: {name} differs from the initial weight of all layouts"
    held = set().union(*replicas)
    assert held == set(full), f"{run.name}: missing {sorted(set(full) - held)}"


def documents(lengths: tuple, step: int) -> list[torch.Tensor]:
    """Return the documents of a step: repeated patterns, with one token more than the model is trained on."""
    generator = torch.Generator().manual_seed(100 + step)
    docs = []
    for i in range(NUM_DOCUMENTS):
        n = lengths[(i + step) % len(lengths)] + 1
        pattern = torch.randint(1, 9, (3 + i % 5,), generator=generator)
        docs.append(pattern.repeat(n // len(pattern) + 1)[:n])
    return docs


def shard(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return this context-parallel rank's shard of x (..., s), as Megatron's data loaders do."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    if layout == "contiguous":
        return x.chunk(size, -1)[rank]
    chunks = x.chunk(2 * size, -1)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), -1)


def packed_batch(docs: list[torch.Tensor], run: Run) -> dict:
    """Make a packed stream. Its documents are padded with tokens that have no loss."""
    padded = [-(-(len(doc) - 1) // PADDED_MULTIPLE) * PADDED_MULTIPLE for doc in docs]
    parts = []
    for doc, n in zip(docs, padded, strict=True):
        fill = (0, n - len(doc) + 1)
        rows = [torch.nn.functional.pad(x, fill) for x in (doc[:-1], doc[1:], torch.ones(len(doc) - 1))]
        parts.append(torch.stack([row.double() for row in rows]))
    cut = [torch.cat(parts, -1)] if run.data_layout == "whole_stream" else parts
    tokens, labels, weights = torch.cat([shard(part, run.data_layout) for part in cut], -1)[:, None]

    def offsets(lengths):
        return torch.tensor([0, *lengths]).cumsum(0).int()

    bounds, ends = offsets(padded), offsets([len(doc) - 1 for doc in docs])
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds if run.one_cu_seqlens else bounds.clone(),
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )
    return {"tokens": tokens.long(), "labels": labels.long(), "weights": weights.float(), "packed": params}


def micro_batches(docs: list[torch.Tensor], run: Run) -> list[dict]:
    """Return this rank's documents of a step, in the run's form."""
    per_stream = len(run.lengths)
    streams = [docs[i : i + per_stream] for i in range(0, len(docs), per_stream)]
    if not run.alone:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        streams = streams[rank::size]
    if run.form == "packed":
        return [packed_batch(stream, run) for stream in streams]
    if run.form == "single":
        streams = [[doc] for stream in streams for doc in stream]
    batches = []
    for stream in streams:
        rows = shard(torch.stack(stream)[:, :-1], run.data_layout), shard(torch.stack(stream)[:, 1:], run.data_layout)
        batches.append({"tokens": rows[0], "labels": rows[1], "weights": torch.ones(rows[0].shape), "packed": None})
    return batches


def reduce_gradients(model: GPTModel) -> None:
    """Sum gradients as Megatron's DDP and finalize_model_grads do. Losses are divided by the global token count."""
    parameters = list(model.parameters())
    sequence_parallel = [param for param in parameters if getattr(param, "sequence_parallel", False)]
    experts = [param for param in parameters if not getattr(param, "allreduce", True)]
    others = [param for param in parameters if getattr(param, "allreduce", True)]
    sum_gradients(sequence_parallel, parallel_state.get_tensor_model_parallel_group())
    sum_gradients(experts, parallel_state.get_expert_data_parallel_group())
    sum_gradients(others, parallel_state.get_data_parallel_group(with_context_parallel=True))


def sum_gradients(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, in one message."""
    if parameters:
        together = torch.cat([param.grad.flatten() for param in parameters])
        dist.all_reduce(together, group=group)
        for param, grad in zip(parameters, together.split([param.numel() for param in parameters]), strict=True):
            param.grad.copy_(grad.view_as(param))


def train(model: GPTModel, run: Run) -> list[float]:
    """Return the loss per token before each of NUM_STEPS steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(NUM_STEPS):
        docs = documents(run.lengths, step)
        num_tokens = sum(len(doc) - 1 for doc in docs)
        total = torch.zeros(())
        GateLossScale.per_token = 1 / num_tokens
        for param in model.parameters():
            param.grad = torch.zeros_like(param)  # also for an expert without tokens
        for batch in micro_batches(docs, run):
            token_losses = model(batch["tokens"], None, None, labels=batch["labels"], packed_seq_params=batch["packed"])
            loss = (token_losses * batch["weights"]).sum() / num_tokens
            loss.backward()
            total += loss.detach()
        if not run.alone:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            reduce_gradients(model)
        optimizer.step()
        losses.append(total.item())
    return losses


def main(out: str) -> None:
    """Train every run and write {name: losses}."""
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    megatron_cpu.answer_for_gpu()
    results, starts = {}, {}
    # The runs of a layout share its groups. The layout of one rank comes first.
    for sizes, runs in itertools.groupby(sorted(RUNS, key=layout), key=layout):
        if results:  # the groups of a layout have dozens of threads, so end them before the next layout
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        namespace = dist.PrefixStore(str(sizes), store)
        dist.init_process_group("gloo", store=namespace, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
        start_groups(*sizes)
        for run in runs:
            model = build(run)
            assert model.decoder.layers[0].self_attention.core_attention.cp_comm_type == run.model.get("cp_comm_type")
            family = run.name.partition("/")[0]
            if run.alone and family not in starts:
                starts[family] = {name: param.detach().clone() for name, param in model.named_parameters()}
            full = starts[family]
            load(model, run, full)
            assert_same_start(model, run, full)
            results[run.name] = train(model, run) if rank == 0 or not run.alone else []
            shared_plans.clear()
    end_worker(out, results)


if __name__ == "__main__":
    main(sys.argv[1])
