"""CUDA behaviour of the operators: graphs, streams, synchronisation, determinism, devices, dispatch."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from support.accuracy import RESULTS, relative_errors, run
from support.cuda import captured, no_synchronisation
from support.inputs import Inputs, make_inputs
from support.messages import mentions

from megatron_sb import cli, stickbreaking_attention, stickbreaking_attention_varlen

pytestmark = pytest.mark.gpu
ops = torch.ops.megatron_sb

# (dtype, head_dim): two pairs that the Hopper kernels serve, and two that only the portable kernels serve.
KINDS = [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 160), (torch.float32, 64)]
kinds = pytest.mark.parametrize(("dtype", "d"), KINDS, ids=lambda value: str(value).removeprefix("torch."))
forms = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
EDGES = [0, 70, 70, 71, 500, 900]


def inputs(packed: bool, dtype: torch.dtype, d: int, regime: str = "mean -8", seed: int = 0) -> Inputs:
    sizes = {"h": 4, "h_kv": 2, "d": d, "dtype": dtype, "seed": seed}
    return make_inputs(regime, s=1000, **sizes).packed() if packed else make_inputs(regime, b=2, s=500, **sizes)


def call(packed: bool):
    """Return the operator and its arguments after q, k, v."""
    cu_seqlens = torch.tensor(EDGES, dtype=torch.int32)
    return (stickbreaking_attention_varlen, (cu_seqlens,)) if packed else (stickbreaking_attention, ())


def assert_same(actual: dict, expected: dict) -> None:
    for name in RESULTS:
        assert torch.equal(actual[name], expected[name]), name


@kinds
@forms
def test_graph(packed, dtype, d):
    """A captured forward and backward, replayed with other inputs and documents, is bitwise equal to eager."""
    attention, args = call(packed)
    x = inputs(packed, dtype, d)
    graph, results = captured(lambda: run(attention, x, *args, return_mass=True))
    for seed, regime, edges in (
        (1, "mean -3.2", [0, 1, 300, 300, 640, 1000]),
        (2, "randn", [0, 128, 256, 700, 701, 702]),
    ):
        replay_inputs = inputs(packed, dtype, d, regime, seed)
        for static, new in zip(vars(x).values(), vars(replay_inputs).values(), strict=True):
            static.copy_(new)
        for static in args:
            static.copy_(torch.tensor(edges, dtype=torch.int32))
        graph.replay()
        assert_same(results, run(attention, replay_inputs, *args, return_mass=True))


@kinds
@forms
def test_other_stream(packed, dtype, d):
    """All kernels run on the current stream: they read inputs that are written late on that stream."""
    attention, args = call(packed)
    x = inputs(packed, dtype, d)
    expected = run(attention, x, *args, return_mass=True)
    late = Inputs(*(torch.full_like(t, torch.nan) for t in vars(x).values()))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)  # cycles: about 10 ms
        for static, new in zip(vars(late).values(), vars(x).values(), strict=True):
            static.copy_(new)
        actual = run(attention, late, *args, return_mass=True)
        torch.cuda.current_stream().synchronize()
    assert_same(actual, expected)


@kinds
@forms
def test_no_synchronisation(packed, dtype, d):
    """No call synchronises with the device, and cu_seqlens is not copied to the host."""
    attention, args = call(packed)
    x = inputs(packed, dtype, d)
    run(attention, x, *args, return_mass=True)
    with no_synchronisation():
        run(attention, x, *args, return_mass=True)


def test_blocks_do_not_synchronise():
    """The block functions do not synchronise when the segment table is on the device."""
    x = inputs(False, torch.bfloat16, 128)
    segments = torch.tensor([[0, 200, 0, 300, 100], [200, 300, 300, 200, -50]], dtype=torch.int32)
    carry = torch.rand(2, 4, 500)
    with no_synchronisation():
        _, _, edge, restart = ops.block_forward(x.q, x.k, x.v, segments, carry, scale=0.1)
        ops.block_backward(x.do, x.q, x.k, x.v, segments, edge, restart, None, carry, scale=0.1)


@pytest.mark.parametrize("regime", ["mean -11", "randn"])
@forms
@kinds
def test_bitwise_deterministic(packed, dtype, d, regime):
    """1000 runs of forward and backward are bitwise equal."""
    attention, args = call(packed)
    x = inputs(packed, dtype, d, regime)
    first = run(attention, x, *args, return_mass=True)
    differing = torch.zeros(len(RESULTS), dtype=torch.int64)
    for _ in range(1000):
        again = run(attention, x, *args, return_mass=True)
        differing += torch.stack([(again[name] != first[name]).any() for name in RESULTS])
    assert dict(zip(RESULTS, differing.tolist(), strict=True)) == dict.fromkeys(RESULTS, 0)


@pytest.mark.parametrize("regime", ["mean -11", "randn"])
@pytest.mark.parametrize(
    ("h", "h_kv", "d"), [(12, 4, 128), (8, 1, 128), (16, 1, 64), (16, 2, 128), (4, 4, 64), (2, 2, 128)]
)
def test_bitwise_deterministic_at_length(h, h_kv, d, regime):
    """20 runs that fill the GPU are bitwise equal while another stream works. Few KV heads: CTAs share key tiles."""
    x = make_inputs(regime, s=8192, h=h, h_kv=h_kv, d=d, dtype=torch.bfloat16)
    first = run(stickbreaking_attention, x, return_mass=True)
    noise, other = torch.randn(2048, 2048), torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(other):
            for _ in range(4):
                torch.mm(noise, noise)
        again = run(stickbreaking_attention, x, return_mass=True)
        assert_same(again, first)


@pytest.mark.parametrize("regime", ["mean -3.2", "randn"])
@kinds
def test_batch_elements_give_the_results_of_each_alone(dtype, d, regime):
    """The results are bitwise equal, also with many more work tiles than CTAs and rows that are used up early.

    With fewer KV heads, CTAs share the key tiles of a batch element alone, so the sums of dk and dv differ in rounding.
    """
    x = make_inputs(regime, b=6, s=2050, h=32, h_kv=16, d=d, dtype=dtype)
    together = run(stickbreaking_attention, x, return_mass=True)
    for i in range(6):
        alone = run(stickbreaking_attention, Inputs(*(t[i : i + 1] for t in vars(x).values())), return_mass=True)
        assert_same({name: t[i : i + 1] for name, t in together.items()}, alone)


@kinds
def test_grouped_heads_give_the_results_of_repeated_heads(dtype, d):
    """Grouped heads: o, mass and dq equal those with one KV head per query head; dk and dv are sums over the group."""
    x = make_inputs("mean -6", b=2, s=300, h=12, h_kv=4, d=d, dtype=dtype)
    grouped = run(stickbreaking_attention, x, return_mass=True)
    k, v = (t.repeat_interleave(3, dim=2) for t in (x.k, x.v))
    repeated = run(stickbreaking_attention, Inputs(x.q, k, v, x.do, x.dmass), return_mass=True)
    for name in ("dk", "dv"):
        repeated[name] = repeated[name].double().unflatten(2, (4, 3)).sum(3)
    for name in RESULTS:
        ulp = torch.finfo(grouped[name].dtype).eps
        tolerance = 32 * ulp if grouped[name].dtype == torch.float32 else ulp
        assert max(relative_errors(grouped[name], repeated[name])) <= tolerance, name


def test_threads():
    """Eight threads, each with its own stream, run at the same time and get their own results."""
    x = inputs(False, torch.bfloat16, 64)
    expected = run(stickbreaking_attention, x, return_mass=True)
    torch.cuda.synchronize()
    failures = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results = run(stickbreaking_attention, x, return_mass=True)
                torch.cuda.current_stream().synchronize()
            assert_same(results, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert not failures


def test_fp64_inputs_raise_an_error():
    """Only the CPU kernels support fp64. The error names the request and lists the GPU kernels."""
    q = torch.zeros(1, 8, 1, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match=mentions("CUDA fp64 head_dim 64 hopper portable")):
        stickbreaking_attention(q, q, q)


def test_info_lists_the_kernels(capsys):
    """`megatron-sb info` lists the kernels and what they support, fastest first."""
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert 0 < text.index("  hopper: CUDA sm_90") < text.index("  portable: CUDA sm_80") < text.index("  cpu: CPU")


def test_hopper_and_portable_kernels_agree(tmp_path):
    """MEGATRON_SB_KERNELS=portable gives the results of the default kernels up to rounding."""
    code = """if True:
        import sys, torch
        from support.accuracy import run
        from support.inputs import make_inputs
        from megatron_sb import stickbreaking_attention
        with torch.device("cuda"):
            x = make_inputs("mean -6", b=2, s=700, h=4, h_kv=2, d=128, dtype=torch.bfloat16)
            torch.save(run(stickbreaking_attention, x, return_mass=True), sys.argv[1])
    """
    results = {}
    for kernels in ("", "portable"):
        path = tmp_path / f"results_{kernels}.pt"
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MEGATRON_SB_KERNELS": kernels}
        command = [sys.executable, "-c", code, path]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment}, check=True, timeout=120)
        results[kernels] = torch.load(path)
    for name in RESULTS:
        assert max(relative_errors(results[""][name], results["portable"][name])) <= 2**-7, name


@pytest.mark.multigpu
def test_tensors_of_another_gpu():
    """The kernels run on the GPU of the tensors, not on the current one."""
    x = inputs(False, torch.bfloat16, 128)
    on_gpu_1 = Inputs(*(t.to("cuda:1") for t in vars(x).values()))
    actual = run(stickbreaking_attention, on_gpu_1, return_mass=True)
    assert all(t.device == torch.device("cuda:1") for t in actual.values())
    assert_same({name: t.to("cuda:0") for name, t in actual.items()}, run(stickbreaking_attention, x, return_mass=True))
