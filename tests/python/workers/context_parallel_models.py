"""Checks of context parallelism in models that know nothing of other ranks. Every rank calls each with the group."""

import itertools

import pytest
import torch
import torch.distributed as dist
from context_parallel_accuracy import EXCHANGING, groups_for
from context_parallel_refusals import expect_on_every_rank, offsets
from support.messages import mentions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megatron_sb as sb
from megatron_sb.baselines.softmax import SoftmaxAttention, context_parallel_softmax
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
from megatron_sb.options import reach_of_heads
from megatron_sb.torch_version import major_minor

SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}

COLUMNS = (*(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate")), "mlp.gate_proj", "mlp.up_proj")
TENSOR_PARALLEL = {name: ColwiseParallel() for name in COLUMNS}
TENSOR_PARALLEL |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}


def results(model: torch.nn.Module, logits: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the parameters for a weighted sum of the logits."""
    return list(torch.autograd.grad((logits * weights).sum(), list(model.parameters())))


def ranks_averaged_over(size: int) -> int:
    """Return how many ranks FSDP2 over `size` ranks averages gradients over. On CPUs, torch 2.8 adds them instead."""
    adds = torch.empty(0).device.type == "cpu" and major_minor(torch.__version__) < (2, 9)
    return 1 if adds else size


def a_transformers_model_is_untouched(group) -> None:
    """Logits and gradients equal those of one rank, for a batch and for packed documents, in every layout."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = StickBreakingForCausalLM(StickBreakingConfig(**SIZES, initializer_range=0.3))
    for lengths, layout in itertools.product(
        (None, (20 * size, 2 * size, 26 * size)), ("zigzag", "contiguous", "balanced")
    ):
        rows = 48 * size
        ids = torch.randint(50, (1 if lengths else 2, rows))
        weights = torch.randn(*ids.shape, 50)
        documents = ids.split(lengths, dim=1) if lengths else [ids]
        expected = torch.cat([model(document).logits for document in documents], dim=1)
        expected_gradients = results(model, expected, weights)
        cu_seqlens = offsets(0, *itertools.accumulate(lengths)) if lengths else None
        plan = sb.ContextParallelPlan(group, rows, cu_seqlens, layout)
        with sb.shared_sequence(plan, ids, weights) as (local_ids, local_weights):
            logits = model(local_ids).logits
            gradients = results(model, logits, local_weights)
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)
        cut = {"dim": 1, "layout": layout, "cu_seqlens": cu_seqlens}
        found = sb.unshard_sequence(logits.detach(), group, **cut)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{lengths}, {layout}: logits")
        for gradient, exact in zip(gradients, expected_gradients, strict=True):
            error = ((gradient - exact).norm() / exact.norm()).item()
            assert error < 1e-5, f"{lengths}, {layout}: a gradient has an error of {error:.2g}"
    assert model(ids[:, :7]).logits.shape == (1, 7, 50)  # the block has ended


def with_sharded_parameters(group) -> None:
    """FSDP2 and, on four ranks, tensor parallelism in torch's manner give the gradients of one rank."""
    size = dist.get_world_size()
    device, over_heads = torch.empty(0).device.type, 2 if size >= 4 else 1
    mesh = init_device_mesh(device, (size // over_heads, over_heads), mesh_dim_names=("cp", "tp"))
    torch.manual_seed(0)
    config = StickBreakingConfig(**SIZES, initializer_range=0.3, reach=(0.5, 6.0), forget_gate=True)
    model, whole = StickBreakingForCausalLM(config), StickBreakingForCausalLM(config)
    whole.load_state_dict(model.state_dict())
    for layer in model.model.layers:
        if over_heads > 1:
            parallelize_module(layer, mesh["tp"], TENSOR_PARALLEL)
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    ids, weights = torch.randint(50, (2, 24 * size)), torch.randn(2, 24 * size, 50)
    (whole(ids).logits * weights).sum().backward()
    plan = sb.ContextParallelPlan(mesh["cp"], 24 * size)
    with sb.shared_sequence(plan, ids, weights) as (local_ids, local_weights):
        (model(local_ids).logits * local_weights).sum().backward()
    for (name, parameter), exact in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() * ranks_averaged_over(size // over_heads)
        error = ((gradient - exact.grad).norm() / exact.grad.norm()).item()
        assert error < 1e-5, f"the gradient of {name} has an error of {error:.2g}"


def dtensors(group) -> None:
    """torch's local_map runs the functions on DTensors with sharded heads, sharded rows, and both."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, 6 * size, heads, 8) for heads in (2 * size, size, size, 2 * size)]
    q, k, v, do = (x.requires_grad_(i < 3) for i, x in enumerate(whole))
    expected = sb.stickbreaking_attention(q, k, v, reach=(0.5, 6.0))
    gradients = torch.autograd.grad(expected, (q, k, v), do)
    over_heads = 2 if size >= 4 else size
    mesh = init_device_mesh(torch.empty(0).device.type, (size // over_heads, over_heads), mesh_dim_names=("cp", "tp"))
    for cp, tp in itertools.product((None, mesh["cp"]), (None, mesh["tp"])):
        placements = [Replicate() if cp is None else Shard(1), Replicate() if tp is None else Shard(2)]

        def attend(q, k, v, cp=cp, tp=tp):
            heads = q.shape[2]
            first = heads * tp.get_local_rank() if tp is not None else 0
            reach = reach_of_heads((0.5, 6.0), 2 * size, first, first + heads)
            if cp is None:
                return sb.stickbreaking_attention(q, k, v, reach=reach)
            return sb.context_parallel_attention(q, k, v, cp, layout="contiguous", reach=reach)

        sharded = [distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in (q, k, v)]
        o = local_map(attend, placements, (placements,) * 3, device_mesh=mesh)(*sharded)
        found = torch.autograd.grad(o, sharded, distribute_tensor(do, mesh, placements))
        for x, exact in zip((o, *found), (expected, *gradients), strict=True):
            torch.testing.assert_close(x.full_tensor(), exact, rtol=1e-4, atol=1e-5)
    for function in (sb.shard_sequence, sb.unshard_sequence):  # they take the local tensors of DTensors
        expect_on_every_rank(lambda call=function: call(o, group), mentions("x elements DTensor"), TypeError)


def a_layer_with_sharded_parameters(group) -> None:
    """FSDP2 shards the parameters of StickBreakingSelfAttention over the ranks that share the sequence."""
    size = dist.get_world_size()
    mesh = init_device_mesh(torch.empty(0).device.type, (size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    options = {"remainder_bias": True, "head_norm": True, "forget_gate": True, "reach": (0.5, 6.0)}
    whole = sb.StickBreakingSelfAttention(32, 4, 2, **options)
    layer = sb.StickBreakingSelfAttention(32, 4, 2, **options, cp_group=mesh["cp"])
    layer.load_state_dict(whole.state_dict())
    fully_shard(layer, mesh=mesh["cp"])
    x, weights = torch.randn(2, 8 * size, 32), torch.randn(2, 8 * size, 32)
    (whole(x) * weights).sum().backward()
    (layer(sb.shard_sequence(x, mesh["cp"])) * sb.shard_sequence(weights, mesh["cp"])).sum().backward()
    for (name, parameter), exact in zip(layer.named_parameters(), whole.parameters(), strict=True):
        gradient = parameter.grad.full_tensor() * ranks_averaged_over(size)
        error = ((gradient - exact.grad).norm() / exact.grad.norm()).item()
        assert error < 1e-5, f"the gradient of {name} has an error of {error:.2g}"


def reach_needs_to_know_the_heads(group) -> None:
    """A layer whose projections were cut by hand has heads that nothing names. It raises an error."""
    config = StickBreakingConfig(**SIZES, reach=(0.5, 6.0))
    model = StickBreakingForCausalLM(config)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, torch.nn.Linear(64, 32, bias=False))
    wanted = mentions("reach None (0.5, 6.0) 4 of 8 heads DTensor parallelize_module")
    expect_on_every_rank(lambda: model(torch.zeros(1, 8, dtype=torch.int64)), wanted)


def reach_at_its_bound(group) -> None:
    """Rounding must not take the reach of the last head, 0.9 + 3 * (64 - 0.9) / 3, above 64 on any rank."""
    size = dist.get_world_size()
    q, k, v = (torch.randn(1, 8 * size, size, 8) for _ in range(3))
    expected = sb.stickbreaking_attention(q, k, v, reach=(0.9, 64.0))
    local = (sb.shard_sequence(x, group) for x in (q, k, v))
    found = sb.unshard_sequence(sb.context_parallel_attention(*local, group, comm="a2a", reach=(0.9, 64.0)), group)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert size != 4 or 0.9 + 3 * ((64 - 0.9) / 3) > 64
    assert 64 - 2**-16 < reach_of_heads((0.9, 64.0), 4, 3, 4)[1] <= 64


def variants_of_the_attention_in_a_shared_sequence(group) -> None:
    """Masses, gates, biases and logits reach the ranks, dense and packed."""
    rows = 12 * dist.get_world_size()
    q, k, v = (torch.randn(1, rows, heads, 8) for heads in (4, 2, 2))
    names = ("forget_gate", "query_bias", "key_bias")
    tensors = [torch.rand(1, rows, heads) for heads in (2, 4, 2)]
    options = {"return_mass": True, "attend_current": True, "logits": "euclidean"}
    cu_seqlens = offsets(0, rows // 3, rows)
    of_rows = {name: x[0] for name, x in zip(names, tensors, strict=True)}
    packed = sb.stickbreaking_attention_varlen(q[0], k[0], v[0], cu_seqlens, **of_rows, **options)
    for documents, (o, mass) in (
        (None, sb.stickbreaking_attention(q, k, v, **dict(zip(names, tensors, strict=True)), **options)),
        (cu_seqlens, [x[None] for x in packed]),
    ):
        plan = sb.ContextParallelPlan(group, rows, documents)
        with sb.shared_sequence(plan, q, k, v, *tensors) as local:
            of_rank = dict(zip(names, local[3:], strict=True))
            found, found_mass = sb.stickbreaking_attention(*local[:3], **of_rank, **options)
        torch.testing.assert_close(sb.unshard_sequence(found, group, 1, cu_seqlens=documents), o, rtol=1e-4, atol=1e-5)
        gathered = sb.unshard_sequence(found_mass, group, 2, cu_seqlens=documents)
        torch.testing.assert_close(gathered, mass, rtol=1e-4, atol=1e-5)


def refuses_wrong_use_of_a_shared_sequence(group) -> None:
    """Errors are raised before any rank waits for another one, and the block ends."""
    rows = 8 * dist.get_world_size()
    plan, packed = sb.ContextParallelPlan(group, rows), sb.ContextParallelPlan(group, rows, offsets(0, rows))
    x = torch.randn(2, 8, 2, 8)

    def inside(plan, function, *args, tensors=()):
        with sb.shared_sequence(plan, *tensors):
            function(*args)

    def biased(name, tensor):
        sb.stickbreaking_attention(x[:1], x[:1], x[:1], **{name: tensor})

    layer, cache = sb.StickBreakingSelfAttention(16, 2), sb.KVCache(2, 8, 2, 8)
    layer.requires_grad_(False)

    def with_cache(cache):
        layer(x.flatten(2), cache=cache)

    model, ids = StickBreakingForCausalLM(StickBreakingConfig(**SIZES)), torch.zeros(1, 8, dtype=torch.int64)

    for call, expected, error in (
        (lambda: inside("a plan", print), "plan ContextParallelPlan str", TypeError),
        (lambda: inside(plan, inside, plan, print), "shared_sequence inside another", ValueError),
        (lambda: inside(plan, print, tensors=[x]), f"tensors {rows} rows plan dimension 1 8", ValueError),
        (lambda: inside(plan, sb.stickbreaking_attention, x, x[:, 1:], x), "q k 8 local rows 7", ValueError),
        (lambda: inside(packed, sb.stickbreaking_attention, x, x, x), "q batch one row (2, 8, 2, 8)", ValueError),
        (lambda: inside(packed, sb.stickbreaking_attention, x[:1], x, x[:1]), "k batch one row", ValueError),
        (lambda: inside(packed, sb.stickbreaking_attention, x[:1], x[:1], x), "v batch one row", ValueError),
        *(
            (
                lambda name=name, shape=shape: inside(packed, biased, name, torch.ones(shape)),
                f"{name} batch one row {shape}",
                ValueError,
            )
            for name in ("forget_gate", "query_bias", "key_bias")
            for shape in ((2, 8, 2), (8, 2))
        ),
        (
            lambda: inside(plan, sb.stickbreaking_attention_varlen, x[0], x[0], x[0], offsets(0, 8)),
            "stickbreaking_attention_varlen shared_sequence plan",
            ValueError,
        ),
        (
            lambda: inside(plan, with_cache, cache),
            "stickbreaking_attention_with_kvcache shared_sequence cache",
            ValueError,
        ),
        (lambda: inside(plan, lambda: model(ids, labels=ids)), "labels shared_sequence shift_labels", ValueError),
        (lambda: inside(plan, print, tensors=[torch.zeros(1, rows), None]), "tensors[1] NoneType", TypeError),
    ):
        expect_on_every_rank(call, mentions(expected), error)
    assert sb.stickbreaking_attention(x, x, x).shape == x.shape
    assert model(ids, labels=ids).loss.isfinite()
    with_cache(cache)
    assert cache.length == 8, "the refused call left rows in the cache"


def a_mesh_is_a_group(group) -> None:
    """A DeviceMesh with one dimension serves as its process group; one with two dimensions does not."""
    size = dist.get_world_size()
    device = torch.empty(0).device.type
    mesh = init_device_mesh(device, (1, size), mesh_dim_names=("dp", "cp"))
    plan = sb.ContextParallelPlan(mesh["cp"], 4 * size)
    assert (plan.rank, plan.size, plan.cp_group) == (dist.get_rank(), size, mesh["cp"].get_group())
    x = torch.randn(1, 4 * size, 2, 8)
    local = sb.shard_sequence(x, mesh["cp"])
    assert torch.equal(local, sb.shard_sequence(x, group))
    assert torch.equal(sb.unshard_sequence(local, mesh["cp"]), x)
    o = sb.context_parallel_attention(local, local, local, mesh["cp"])
    assert torch.equal(o, sb.context_parallel_attention(local, local, local, group))
    layer = sb.StickBreakingSelfAttention(16, 2, cp_group=mesh["cp"])
    assert layer(torch.randn(1, 4, 16)).shape == (1, 4, 16)
    wanted = mentions("cp_group one dimension DeviceMesh ('dp', 'cp')")
    expect_on_every_rank(lambda: sb.ContextParallelPlan(mesh, 4 * size), wanted)


def meshes_are_hierarchical_groups(group) -> None:
    """Two dimensions of a mesh serve as the a2a group and the p2p group, for stick-breaking and softmax attention."""
    size = dist.get_world_size()
    device = torch.empty(0).device.type
    sizes = (1, size // EXCHANGING, EXCHANGING)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "p2p", "a2a"))
    plan = sb.ContextParallelPlan(group, 4 * size)
    local = sb.shard_sequence(torch.randn(1, 4 * size, 4, 8), group)
    softmax = SoftmaxAttention(4, 8)
    functions = {
        "stick-breaking": sb.context_parallel_attention,
        "softmax": lambda *tensors, **options: context_parallel_softmax(softmax, *tensors, **options),
    }
    for name, function in functions.items():

        def results(groups, function=function) -> tuple[torch.Tensor, torch.Tensor]:
            x = local.clone().requires_grad_()
            o = function(x, x, x, plan=plan, comm="a2a+p2p", hierarchical_groups=groups)
            return o.detach(), torch.autograd.grad(o.square().sum(), x)[0]

        expected = results(groups_for("a2a+p2p")["hierarchical_groups"])
        for found, exact in zip(results((mesh["a2a"], mesh["p2p"])), expected, strict=True):
            assert torch.equal(found, exact), name
        wanted = mentions("hierarchical_groups[1] one dimension DeviceMesh")
        expect_on_every_rank(lambda call=results: call((mesh["a2a"], mesh["dp", "p2p"])), wanted)
        # Groups that cross: each rank has the right place in its own groups, but the grid is none.
        last = size - EXCHANGING
        crossed = [dist.new_group(ranks) for ranks in ([0, last + 1], [1, last])]
        if (rank := dist.get_rank()) in (0, 1, last, last + 1):
            mine = crossed[rank in (1, last)]
            with pytest.raises(ValueError, match=mentions("hierarchical_groups[1] p2p")):
                results((mesh["a2a"], mine))
        wanted = mentions("hierarchical_groups[0] ProcessGroup str")
        expect_on_every_rank(lambda call=results: call(("a2a", mesh["p2p"])), wanted, TypeError)
