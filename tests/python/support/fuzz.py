"""Random attention calls with all options, and a function that checks the result of a call.

A case depends only on its number, and its repr is Python source. Run a failed case again with:

    PYTHONPATH=tests/python python -c "from support.fuzz import *; print(judge(Case(...), 'cuda'))"
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_sb import reference, stickbreaking_attention, stickbreaking_attention_varlen

from . import bias_columns
from .accuracy import run
from .blocks import run_in_blocks
from .bounds import error_bounds, error_bounds_packed, excesses
from .inputs import REGIMES, STRIDES, Inputs, make_inputs, strided
from .offsets import with_wrong_entries

_EDGES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
_MAX_WEIGHTS = 1_500_000  # of a case: batch * heads * queries * keys
CALLERS = ("plain", "stream", "threads", "subclass", "many heads")
_MANY_HEADS = 300  # a GPU runs fewer work tiles at once


@dataclass(frozen=True)
class Case:
    """One call. `lengths` are (queries, keys) of each document. Forms other than "packed" have one document."""

    form: str  # "dense", "packed" or "blocks"
    dtype: str
    b: int
    h: int
    h_kv: int
    d: int
    d_v: int
    lengths: tuple[tuple[int, int], ...]
    beyond: int  # packed: number of rows after the last document, which hold NaN
    strides: str  # one of STRIDES, or "contiguous"
    regime: str
    attend_current: bool
    scale: float  # in units of 1 / sqrt(d)
    mass_threshold: float
    mass_in_loss: bool
    cuts: tuple[float, ...]  # blocks: where the keys are cut, as fractions
    carry: bool  # blocks: whether the forward of a block gets its carry
    seed: int
    biases: bool = False  # whether the last columns of q and k hold biases (bias_columns.py)
    wrong_offsets: bool = False  # packed, on a GPU: whether offsets below an earlier one are inserted
    caller: str = "plain"  # one of CALLERS: on another stream, in two threads at once, with a subclass of Tensor, or
    # with copies of all heads


class Subclass(Tensor):
    """A subclass without its own operators."""


def draw_case(number: int) -> Case:
    """Return the case with this number."""
    rng = random.Random(number)
    form = rng.choices(("dense", "packed", "blocks"), (5, 4, 1))[0]
    h_kv = rng.choice((1, 1, 2, 3))
    h = h_kv * rng.choice((1, 1, 2, 3, 4, 8))
    d = rng.choice((64, 128)) if rng.random() < 0.5 else 8 * rng.randint(1, 32)
    d_v = d if rng.random() < 0.75 else 8 * rng.randint(1, 32)
    biases = rng.random() < 0.1
    if biases:
        d, d_v = rng.choice(((72, 64), (136, 128)))
    b = rng.choice((1, 1, 1, 2, 3)) if form != "packed" else 1
    documents = rng.randint(1, 8) if form == "packed" else 1
    longer_keys = rng.random() < 0.4
    lengths = [(s, s + (_length(rng) if longer_keys else 0)) for s in (_length(rng) for _ in range(documents))]
    while b * h * sum(s * s_k for s, s_k in lengths) > _MAX_WEIGHTS:
        lengths = [(s // 2, s // 2 + (s_k - s) // 2) for s, s_k in lengths]
    return Case(
        form=form,
        dtype=rng.choices(("bfloat16", "float16", "float32"), (5, 2, 3))[0],
        b=b,
        h=h,
        h_kv=h_kv,
        d=d,
        d_v=d_v,
        lengths=tuple(lengths),
        beyond=rng.choice((0, 0, 1, 40, 130)) if form == "packed" else 0,
        strides=rng.choice(
            (
                "contiguous",
                *(kind for kind in STRIDES if _fits(kind, form, d == d_v and all(s == s_k for s, s_k in lengths))),
            )
        ),
        regime=rng.choice(sorted(REGIMES)),
        attend_current=rng.random() < 0.3,
        scale=rng.choice((1.0, 1.0, 0.5, 1.7, -0.7)),
        mass_threshold=rng.choice((0.0, 2.0**-24, 2.0**-24, 1e-3)),
        mass_in_loss=rng.random() < 0.7,
        cuts=tuple(round(rng.random(), 3) for _ in range(rng.randint(1, 3))) if form == "blocks" else (),
        carry=rng.random() < 0.5,
        seed=number,
        biases=biases,
        wrong_offsets=form == "packed" and rng.random() < 0.3,
        caller=rng.choices(CALLERS, (6, 1, 1, 1, 2))[0],
    )


def _length(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.1:
        return rng.choice((0, 1, 1))
    return rng.choice(_EDGES) if kind < 0.5 else rng.randint(1, 420)


def _fits(kind: str, form: str, same_shape: bool) -> bool:
    if form == "blocks" and "last" in kind:  # the block operators take unit last strides only
        return False
    return same_shape or kind != "fused qkv"


def judge(case: Case, device: str = "cuda", mutate=None) -> list[str]:
    """Run a case and return a list of its errors, which is empty if the results are right.

    mutate(results) changes the operator's results before they are checked. Tests of this function use it.
    """
    with torch.device(device):
        x, edges, edges_k = _inputs(case)
        given = Inputs(*(t.clone() for t in vars(x).values()))
        actual = _CALLS[case.caller](case, x, edges, edges_k)
        if mutate is not None:
            mutate(actual)
        oracle, bounds = _run_oracle(case, given, edges, edges_k)
        if case.biases:
            actual, oracle, bounds = (bias_columns.read_gradients(results) for results in (actual, oracle, bounds))
        longest = max((s_k for _, s_k in case.lengths), default=0)
        wrong = [
            f"{name}: {tuple(actual[name].shape)} {actual[name].dtype} instead of {tuple(oracle[name].shape)}"
            for name in oracle
            if actual[name].shape != oracle[name].shape or actual[name].dtype != _dtype_of(case, name)
        ]
        if wrong:
            return wrong
        limits = {"dtype": getattr(torch, case.dtype), "num_keys": longest, "threshold": case.mass_threshold}
        found = excesses(actual, oracle, bounds, **limits)
        return [f"{name}: error {excess:.3g} times its bound" for name, excess in found.items() if not excess <= 1]


def _dtype_of(case: Case, name: str) -> torch.dtype:
    if name == "mass" or case.form == "blocks":
        return torch.float32
    return getattr(torch, case.dtype)


def _options(case: Case) -> dict:
    return {"attend_current": case.attend_current, "scale": case.scale * case.d**-0.5}


def _inputs(case: Case) -> tuple[Inputs, list[int], list[int]]:
    """Return the inputs of a case, and the offsets of its documents in the queries and in the keys."""
    edges, edges_k = ([0, *accumulate(lengths)] for lengths in zip(*case.lengths, strict=True))
    sizes = {"b": case.b, "h": case.h, "h_kv": case.h_kv, "d": case.d, "d_v": case.d_v}
    rows = {"s": edges[-1] + case.beyond, "s_k": edges_k[-1] + case.beyond}
    x = make_inputs(case.regime, dtype=getattr(torch, case.dtype), seed=case.seed, **sizes, **rows)
    if case.biases:
        x = bias_columns.with_biases(x)
    if not case.mass_in_loss:
        x.dmass.zero_()
    if case.beyond:
        for tensor, last in ((x.q, edges), (x.do, edges), (x.k, edges_k), (x.v, edges_k)):
            tensor[:, last[-1] :] = torch.nan
        x.dmass[..., edges[-1] :] = torch.nan
    if case.strides != "contiguous":
        x.q, x.k, x.v = strided(case.strides, x)
    return (x.packed() if case.form == "packed" else x), edges, edges_k


def _run_on_a_stream(case: Case, x: Inputs, *edges: list[int]) -> dict[str, Tensor]:
    if not x.q.is_cuda:
        return _run_operator(case, x, *edges)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = _run_operator(case, x, *edges)
    torch.cuda.current_stream().wait_stream(stream)
    return results


def _run_in_threads(case: Case, x: Inputs, *edges: list[int]) -> dict[str, Tensor]:
    """Run the call in two threads at once, each on its own stream. A result that differs becomes NaN."""

    def call(_):
        with torch.device(x.q.device):
            return _run_on_a_stream(case, x, *edges)

    if x.q.is_cuda:
        torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(call, range(2))
    if x.q.is_cuda:
        torch.cuda.synchronize()
    for name, value in first.items():
        value[value != second[name]] = torch.nan
    return first


def _run_with_subclass(case: Case, x: Inputs, *edges: list[int]) -> dict[str, Tensor]:
    x = Inputs(*(t.as_subclass(Subclass) for t in (x.q, x.k, x.v)), x.do, x.dmass)
    return {name: value.as_subclass(Tensor) for name, value in _run_operator(case, x, *edges).items()}


def _run_with_many_heads(case: Case, x: Inputs, *edges: list[int]) -> dict[str, Tensor]:
    """Run the call with many copies of its heads, as few heads have other work tiles. A result that differs between
    copies becomes NaN.
    """
    copies = _MANY_HEADS // (case.b * case.h) + 1 if x.q.is_cuda else 2
    copied = Inputs(
        *(torch.cat([t] * copies, dim=-2) for t in vars(x).values())
    )  # heads are the last but one dimension
    results = {}
    for name, value in _run_operator(case, copied, *edges).items():
        results[name], *others = (copy.clone() for copy in value.chunk(copies, dim=-2))
        for other in others:
            results[name][results[name] != other] = torch.nan
    return results


def _run_operator(case: Case, x: Inputs, edges: list[int], edges_k: list[int]) -> dict[str, Tensor]:
    options = {**_options(case), "mass_threshold": case.mass_threshold}
    if case.form == "blocks":
        results = run_in_blocks(x, list(case.cuts), case.carry, bias_columns=case.biases, **options)
        results.pop("prefix")
        return results
    options |= {"return_mass": True, "mass_in_loss": case.mass_in_loss}
    if case.form == "dense":
        return run(bias_columns.attention if case.biases else stickbreaking_attention, x, **options)
    same_edges = edges == edges_k
    if case.wrong_offsets and x.q.is_cuda:
        edges, edges_k = with_wrong_entries(random.Random(case.seed), edges, edges_k)
    cu_seqlens, cu_seqlens_k = (torch.tensor(e, dtype=torch.int32) for e in (edges, edges_k))
    if not same_edges:
        options["cu_seqlens_k"] = cu_seqlens_k
    return run(bias_columns.attention if case.biases else stickbreaking_attention_varlen, x, cu_seqlens, **options)


_CALLS = {
    "plain": _run_operator,
    "stream": _run_on_a_stream,
    "threads": _run_in_threads,
    "subclass": _run_with_subclass,
    "many heads": _run_with_many_heads,
}


def _run_oracle(
    case: Case, x: Inputs, edges: list[int], edges_k: list[int]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    # The operator must ignore rows after the last document. The oracle gets 0 there, because it would compute 0 * NaN.
    x = Inputs(*(torch.nan_to_num(t.double()) for t in vars(x).values()))
    options = {**_options(case), "return_mass": True}
    num_blocks = len(case.cuts) + 1  # each may skip keys below the threshold
    bounds_options = {**_options(case), "mass_threshold": case.mass_threshold * num_blocks}
    narrow = Inputs(*(t.to(getattr(torch, case.dtype)) for t in (x.q, x.k, x.v, x.do)), x.dmass)
    if case.form == "packed":
        cu_seqlens, cu_seqlens_k = (torch.tensor(e) for e in (edges, edges_k))
        oracle = run(reference.stickbreaking_attention_varlen, x, cu_seqlens, cu_seqlens_k=cu_seqlens_k, **options)
        return oracle, error_bounds_packed(narrow, edges, edges_k, **bounds_options)
    oracle = run(reference.stickbreaking_attention, x, **options)
    return oracle, error_bounds(narrow, **bounds_options)
