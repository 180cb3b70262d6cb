"""Attention to a KV cache copies no keys: not those of a paged cache, and not those of a view of a larger cache."""

import subprocess
import sys

import pytest
import torch

import megatron_sb as sb

MIB = 2**20
# 32 sequences share 1 MiB of blocks. Copied for each sequence, keys and values would need 1 GiB.
SHARED_BLOCKS = """
import torch
import megatron_sb as sb

def peak():  # not that of getrusage, which starts at the peak of the parent process
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(2)
b, s, h, d = 32, 65536, 1, 64
pool = torch.randn(2, 64, 64, h, d)
table = torch.zeros(b, s // 64, dtype=torch.int32)
q = torch.randn(b, 1, h, d)
lengths = torch.full((b,), s, dtype=torch.int32)
sb.stickbreaking_attention_with_kvcache(q, *pool, cache_seqlens=lengths.clamp(max=64), block_table=table[:, :1])
before = peak()
sb.stickbreaking_attention_with_kvcache(q, *pool, cache_seqlens=lengths, block_table=table)
print(peak() - before)
"""


def test_blocks_are_not_copied():
    command = [sys.executable, "-c", SHARED_BLOCKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * MIB


def views_of_caches():
    """Return caches of 3 sequences with 40 keys, as views with different strides."""
    longer = torch.randn(2, 3, 64, 2, 16)
    heads_first = torch.randn(2, 3, 2, 64, 16).transpose(2, 3)
    uneven = torch.randn(2, 3, 64 * 2 * 16 + 8)[..., :-8].unflatten(-1, (64, 2, 16))
    shared = torch.randn(2, 1, 64, 2, 16).expand(2, 3, 64, 2, 16)
    different = (longer[0, :, :40], torch.randn(3, 50, 2, 16)[:, :40])
    return {
        "first keys": longer[:, :, :40],
        "last keys": longer[:, :, 24:],
        "heads first": heads_first[:, :, :40],
        "sequences at no whole number of rows": uneven[:, :, :40],
        "one cache for all sequences": shared[:, :, :40],
        "keys and values with different strides": different,
    }


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("s_q", [1, 36])  # on a GPU in bf16: the decode kernel, and the kernels of the forward pass
@pytest.mark.parametrize("view", list(views_of_caches()))
def test_views_give_bitwise_the_results_of_copies(view, s_q, dtype, device):
    """The kernels may differ, so on a GPU results are compared up to rounding errors."""
    k, v = (x.to(dtype).to(device) for x in views_of_caches()[view])
    q = torch.randn(3, s_q, 4, 16, dtype=dtype, device=device)
    options = {"cache_seqlens": torch.tensor([40, 36, 7], dtype=torch.int32, device=device), "return_mass": True}
    expected = sb.stickbreaking_attention_with_kvcache(q, k.contiguous(), v.contiguous(), **options)
    for actual, wanted in zip(sb.stickbreaking_attention_with_kvcache(q, k, v, **options), expected, strict=True):
        if device == "cpu":
            assert torch.equal(actual, wanted)
        else:
            torch.testing.assert_close(actual, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("s_q", [1, 300])
@pytest.mark.parametrize("paged", [False, True], ids=["view", "paged"])
def test_memory_on_a_gpu(paged, s_q, dtype):
    """The peak of a call is far below the size of the keys: a paged cache and a view of a cache are not copied."""
    b, s, h, d, kind = 8, 16384, 1, 128, {"dtype": dtype, "device": "cuda"}
    q = torch.randn(b, s_q, h, d, **kind)
    options = {"cache_seqlens": torch.full((b,), s, dtype=torch.int32, device="cuda")}
    if paged:
        k, v = torch.randn(2, 64, 64, h, d, **kind)
        options["block_table"] = torch.randint(64, (b, s // 64), dtype=torch.int32, device="cuda")
    else:
        k, v = torch.randn(2, b, s + 64, h, d, **kind)[:, :, :s]
    sb.stickbreaking_attention_with_kvcache(q, k, v, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sb.stickbreaking_attention_with_kvcache(q, k, v, **options)
    size_of_keys = b * s * h * d * q.element_size()
    assert torch.cuda.max_memory_allocated() - before < size_of_keys / 4
