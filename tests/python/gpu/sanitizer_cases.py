"""Every GPU kernel once at small sizes, for compute-sanitizer: compute-sanitizer --tool memcheck python THIS_FILE

With an argument such as 2/4, only the second of four parts of the cases runs. The parts can run at the same time.
The cases cover all dtypes, head_dims with and without a fast kernel, dense and packed inputs, forward and backward, the
block operators, KV caches and all options. Results are checked too, so a run of wrong kernels does not count as clean.
Allocations are not cached, so a read past the end of a tensor is a read past the end of an allocation. Memory is not
filled, so initcheck detects reads of uninitialised values. It takes memory that TMA has written for uninitialised. With
--fill all new tensors and workspaces hold NaN, and a result that uses memory before it is written is wrong, however it
is written.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.accuracy import RESULTS, relative_errors, run
from support.blocks import run_in_blocks
from support.caches import CacheCase
from support.inputs import make_inputs
from support.offsets import corrected, wrong_offsets
from support.variants import VARIANTS, make_variant, packed_options, run_variant, tensors_of

from megatron_sb import (
    stickbreaking_attention,
    stickbreaking_attention_varlen,
    stickbreaking_attention_with_kvcache,
)
from megatron_sb.ops.kvcache import stored_keys

# The largest error against fp32 on the CPU.
DTYPES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
HEAD_DIMS = ((64, 64), (128, 128), (40, 24), (72, 64), (72, 128), (136, 128), (96, 80), (192, 128), (256, 256))
THRESHOLD = 2.0**-24
EDGES, EDGES_K = [0, 1, 1, 150, 190], [0, 30, 31, 200, 240]


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("part", nargs="?", default="1/1", help="part of the cases, such as 2/4 (default: %(default)s)")
parser.add_argument("--fill", action="store_true", help="fill new tensors and workspaces with NaN")
OPTIONS = parser.parse_args()
PART, PARTS = map(int, OPTIONS.part.split("/"))
os.environ.setdefault("MEGATRON_SB_WAIT_LIMIT_SECONDS", "3600")  # racecheck can make waits last for minutes
if not OPTIONS.fill:  # a launch that fails is then an error of this launch, which names the waits of the kernel
    os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")


def of_this_part(generated):
    """Return the cases of a generator that belong to this part."""
    return itertools.islice(generated, PART - 1, None, PARTS)


def fill_new_tensors() -> None:
    """Make torch fill each tensor that it allocates: with NaN, or in integers with the largest number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if not torch.empty(8, device="cuda").isnan().all():
        raise RuntimeError("torch does not fill new tensors")


def cases():
    """Yield (name, attention, inputs on the CPU, arguments, options) of every call."""
    for dtype in DTYPES:
        for d, d_v in HEAD_DIMS:
            sizes = {"h": 2, "h_kv": 1, "d": d, "d_v": d_v, "dtype": dtype}
            name = f"{str(dtype).removeprefix('torch.')} {d}:{d_v}"
            dense = make_inputs("mean -6", s=150, s_k=200, **sizes)
            yield f"{name} dense", stickbreaking_attention, dense, (), {"return_mass": True}
            packed = make_inputs("randn", s=200, s_k=250, **sizes).packed()
            cu_seqlens, cu_seqlens_k = (torch.tensor(edges, dtype=torch.int32) for edges in (EDGES, EDGES_K))
            options = {"return_mass": True, "attend_current": True, "mass_threshold": 0.0}
            yield f"{name} packed", stickbreaking_attention_varlen, packed, (cu_seqlens, cu_seqlens_k), options
    for heads, rows in ((8, 200), (1, 1150)):  # CTAs share key tiles: by query heads, by rows
        for d in (64, 128, 256):
            x = make_inputs("mean -6", s=rows, h=heads, h_kv=1, d=d, dtype=torch.bfloat16)
            yield f"{heads} heads of {d}, {rows} rows", stickbreaking_attention, x, (), {"return_mass": True}
    for d in (64, 128):  # so many heads that work tiles of the forward are not divided
        x = make_inputs("mean -6", s=130, h=140, d=d, dtype=torch.bfloat16)
        yield f"140 heads of {d}", stickbreaking_attention, x, (), {"return_mass": True}


def moved(x, device, dtype=None):
    """Return inputs on another device, with q, k, v and do in another dtype."""
    return type(x)(*(t.to(device, dtype) for t in (x.q, x.k, x.v, x.do)), x.dmass.to(device))


def call(attention, x, args, options):
    """Run the operator with cu_seqlens on the device of its inputs, and return its results."""
    offsets = [t.to(x.q.device) for t in args]
    keywords = {"cu_seqlens_k": offsets[1], **options} if offsets else options
    return run(attention, x, *offsets[:1], **keywords)


def cache_cases():
    """Yield (name, dtype, tensors on the CPU, options) of KV cache calls with many splits, early exit and blocks."""
    for dtype in DTYPES:
        for d, d_v in HEAD_DIMS:
            for block_size, regime in ((None, "mean -11"), (16, "randn")):
                sizes = {"s_q": 3, "h": 8, "h_kv": 2, "d": d, "d_v": d_v, "firsts": [5, 0, 30]}
                options = {"block_size": block_size, "regime": regime, "mass_threshold": THRESHOLD}
                tensors, options = CacheCase([1500, 0, 45], dtype=dtype, **sizes, **options).arguments()
                name = f"{str(dtype).removeprefix('torch.')} {d}:{d_v} {'paged' if block_size else 'contiguous'} cache"
                yield name, dtype, tensors, options
                if max(d, d_v) > 128 or regime == "randn":  # also the kernels that read gates
                    q, k, v = tensors
                    gates = torch.full(k.shape[:-1], 0.9)
                    tensors = (q, stored_keys(k, forget_gate=gates.to(k.device)), v)
                    yield f"{name} with gates", dtype, tensors, options | {"forget_gate": True}


def wrong_caches() -> tuple[int, int]:
    """Return the number of results of KV cache calls, and how many are wrong."""
    failed = count = 0
    for name, dtype, tensors, options in of_this_part(cache_cases()):
        on_gpu = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in options.items()}
        actual = stickbreaking_attention_with_kvcache(*(x.cuda() for x in tensors), **on_gpu, return_mass=True)
        expected = stickbreaking_attention_with_kvcache(*(x.float() for x in tensors), **options, return_mass=True)
        for result, value, wanted in zip(("o", "mass"), actual, expected, strict=True):
            value = value.cpu().float()
            if result == "mass":  # the mass of a used-up row may have any value below the threshold
                value, wanted = (x.masked_fill(x.abs() <= THRESHOLD, 0.0) for x in (value, wanted))
            error, _ = relative_errors(value, wanted)
            count += 1
            if not error <= DTYPES[dtype]:
                failed += 1
                print(f"{name}: {result} has an error of {error:.3g}")
    return count, failed


def variant_errors():
    """Yield (name, error, bound) of every result with forget gates, Euclidean logits and biases, dense and packed."""
    for dtype, allowed in DTYPES.items():
        short = itertools.product(((64, 64), (128, 128), (200, 24)), VARIANTS, (150,))
        long = itertools.product(((64, 64), (128, 128)), ("gated",), (700,))  # fill the ring of gates more than once
        for (d, d_v), variant, rows in of_this_part(itertools.chain(short, long)):
            sizes = {"s": rows, "s_k": rows, "h": 2, "h_kv": 1, "d": d, "d_v": d_v}
            x, options = make_variant(variant, "mean -3.2", dtype=dtype, **sizes)
            for packed in (False, True):
                attention = stickbreaking_attention_varlen if packed else stickbreaking_attention
                form, of_form = (x.packed(), packed_options(options)) if packed else (x, options)
                results = []
                for device, wide in (("cuda", None), ("cpu", torch.float32)):
                    args = (torch.tensor([0, 1, 1, 100, 140], dtype=torch.int32, device=device),) if packed else ()
                    tensors = {tensor: value.to(device) for tensor, value in tensors_of(of_form).items()}
                    results.append(run_variant(attention, moved(form, device, wide), of_form | tensors, *args))
                for result, value in results[0].items():
                    error, _ = relative_errors(value.cpu().float(), results[1][result])
                    yield f"{variant} {dtype} {d}:{d_v} {rows} rows packed={packed} {result}", error, allowed


def wrong_offset_results():
    """Yield (name, whether it is right) of every result with offsets in GPU memory that break the rules."""
    rows, rows_k = 200, 250
    for dtype, (d, d_v) in of_this_part(itertools.product(DTYPES, HEAD_DIMS[:3])):
        x = moved(make_inputs("randn", s=rows, s_k=rows_k, h=2, h_kv=1, d=d, d_v=d_v, dtype=dtype).packed(), "cuda")
        for wrong in wrong_offsets(rows):
            tables = (wrong_offsets(rows)[wrong], wrong_offsets(rows_k)[wrong])
            right = (corrected(tables[0], rows), corrected(tables[1], rows_k))
            results = [
                call(
                    stickbreaking_attention_varlen,
                    x,
                    [torch.tensor(t, dtype=torch.int32) for t in both],
                    {"return_mass": True},
                )
                for both in (tables, right)
            ]
            for name, value in results[1].items():
                yield f"{dtype} {d}:{d_v}, offsets {wrong}: {name}", torch.equal(results[0][name], value)


def main() -> int:
    """Run all cases and print one line. Return 1 if a result is wrong, else 0."""
    if OPTIONS.fill:
        fill_new_tensors()
    count, failed = wrong_caches()
    for name, attention, x, args, options in of_this_part(cases()):
        actual = call(attention, moved(x, "cuda"), args, options)
        expected = call(attention, moved(x, "cpu", torch.float32), args, options)
        if attention is stickbreaking_attention:
            blocks = run_in_blocks(moved(x, "cuda"), [0.4], carry=True)
            actual |= {f"{result} in blocks": blocks[result] for result in RESULTS}
            expected |= {f"{result} in blocks": expected[result] for result in RESULTS}
        for result, value in actual.items():
            error, _ = relative_errors(value.cpu().float(), expected[result])
            count += 1
            if not error <= DTYPES[x.q.dtype]:
                failed += 1
                print(f"{name}: {result} has an error of {error:.3g}")
    for name, found, allowed in variant_errors():
        count += 1
        if not found <= allowed:
            failed += 1
            print(f"{name} has an error of {found:.3g}")
    for name, right in wrong_offset_results():
        count += 1
        if not right:
            failed += 1
            print(f"{name} differs from that of the corrected offsets")
    torch.cuda.synchronize()
    print(f"{count} results, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
