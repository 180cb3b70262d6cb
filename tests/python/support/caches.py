"""KV caches for tests. They hold NaN wherever a call must not read."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_sb import reference, stickbreaking_attention_with_kvcache
from megatron_sb.ops.kvcache import stored_keys

from .accuracy import floors, plain_attention, relative_errors
from .inputs import Inputs, make_inputs
from .rounded import rounded_results, rounds_weights
from .variants import ALLOWED, TENSORS, make_variant

_FACTOR = 2.0
_LOGIT_TRUNCATION = 2.0**-22  # relative error


@dataclass
class CacheCase:
    """Sequences with keys [firsts[i], ends[i]) in caches of `capacity` keys. The queries are the last s_q positions."""

    ends: list[int]
    s_q: int = 1
    h: int = 4
    h_kv: int = 2
    d: int = 64
    d_v: int | None = None
    dtype: torch.dtype = torch.float32
    regime: str = "mean -6"
    capacity: int = 0
    block_size: int | None = None
    firsts: list[int] | None = None
    attend_current: bool = False
    mass_threshold: float = 0.0
    seed: int = 0
    x: Inputs = field(init=False)  # (b, s_q or capacity, ..): all positions of the cache, also outside the sequences

    def __post_init__(self) -> None:
        self.capacity = self.capacity or max(self.ends)
        sizes = {"h": self.h, "h_kv": self.h_kv, "d": self.d, "d_v": self.d_v, "dtype": self.dtype, "seed": self.seed}
        self.x = make_inputs(self.regime, b=len(self.ends), s=self.s_q, s_k=self.capacity, **sizes)

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
        """Return the arguments of `stickbreaking_attention_with_kvcache`: (q, caches), and the others by name."""
        begins = self.firsts or [0] * len(self.ends)
        caches = [torch.full_like(t, torch.nan) for t in (self.x.k, self.x.v)]
        for cache, whole in zip(caches, (self.x.k, self.x.v), strict=True):
            for i, (first, end) in enumerate(zip(begins, self.ends, strict=True)):
                cache[i, first:end] = whole[i, first:end]
        options = {
            "cache_seqlens": torch.tensor(self.ends, dtype=torch.int32),
            "attend_current": self.attend_current,
            "mass_threshold": self.mass_threshold,
        }
        if self.firsts is not None:
            options["cache_leftpad"] = torch.tensor(self.firsts, dtype=torch.int32)
        if self.block_size is not None:
            caches, options["block_table"] = self._paged(caches)
        return (self.x.q, *caches), options

    def _paged(self, caches: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the caches in blocks of random order, three of them unused, and the block table.

        Entries of the table that no sequence needs are out of range.
        """
        size, batch = self.block_size, len(self.ends)
        per_sequence = -(-self.capacity // size)
        order = torch.randperm(batch * per_sequence + 3, generator=torch.Generator().manual_seed(1), device="cpu")
        table = order[: batch * per_sequence].view(batch, per_sequence).to(self.x.q.device)
        paged = []
        for cache in caches:
            rows = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, per_sequence * size - self.capacity), value=torch.nan)
            blocks = rows.new_full((len(order), size, *rows.shape[2:]), torch.nan)
            blocks[table.flatten()] = rows.unflatten(1, (per_sequence, size)).flatten(0, 1)
            paged.append(blocks)
        used = torch.tensor([-(-end // size) for end in self.ends])
        beyond = torch.arange(per_sequence) >= used[:, None]
        return paged, table.masked_fill(beyond, 2**31 - 1).int()

    def expected(self, attention) -> tuple[Tensor, Tensor]:
        """Return o and mass of attention(inputs) -> (o, mass) for each sequence alone, in float64.

        Queries before the beginning of their sequence have o = 0 and mass = 1.
        """
        o = torch.zeros(*self.x.q.shape[:3], self.x.v.shape[-1], dtype=torch.float64)
        mass = torch.ones(self.x.q.shape[0], self.h, self.s_q, dtype=torch.float64)
        for i, end in enumerate(self.ends):
            first = self.firsts[i] if self.firsts else 0
            queries = min(self.s_q, end - first)
            if queries == 0:
                continue
            x, rows, keys = self.x, slice(self.s_q - queries, None), slice(first, end)
            tensors = (x.q[i, rows], x.k[i, keys], x.v[i, keys], x.do[i, rows], x.dmass[i, :, rows])
            found = attention(Inputs(*(tensor[None] for tensor in tensors)))
            o[i, rows], mass[i, :, rows] = found[0][0].double(), found[1][0].double()
        return o, mass

    def oracle(self) -> tuple[Tensor, Tensor]:
        """Return o and mass from the float64 oracle."""

        def exact(one: Inputs) -> tuple[Tensor, Tensor]:
            options = {"attend_current": self.attend_current, "return_mass": True}
            return reference.stickbreaking_attention(one.q.double(), one.k.double(), one.v.double(), **options)

        return self.expected(exact)

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return o and mass from the plain computation that `support.accuracy` defines."""

        def rounded(one: Inputs) -> tuple[Tensor, Tensor]:
            results = rounded_results(one, attend_current=self.attend_current)
            return results["o"], results["mass"]

        def by_definition(one: Inputs) -> tuple[Tensor, Tensor]:
            return plain_attention(one.q, one.k, one.v, attend_current=self.attend_current)

        return self.expected(rounded if rounds_weights(self.x.q) else by_definition)


class VariantCase:
    """Caches of a variant, and the results of the float64 oracle for them."""

    def __init__(self, name: str, ends: list[int], regime: str = "mean -6", **sizes):
        self.caches = CacheCase(ends, regime=regime, **sizes)
        case = self.caches
        shape = {"b": len(ends), "s": case.s_q, "s_k": case.capacity, "h": case.h, "h_kv": case.h_kv}
        self.x, self.options = make_variant(name, regime, d=case.d, d_v=case.d_v, dtype=case.dtype, **shape)
        self.gate, self.query_bias, self.key_bias = (self.options.pop(tensor, None) for tensor in TENSORS)
        if self.query_bias is not None and self.key_bias is None and self.options["logits"] == "dot":
            self.key_bias = self.x.k.new_zeros(self.x.k.shape[:-1])  # the keys need the columns
        self.of_keys = {"forget_gate": self.gate, "key_bias": self.key_bias}
        of_cache = {name: value for name, value in self.options.items() if name != "reach"}
        case.x = Inputs(**{**vars(self.x), "k": stored_keys(self.x.k, **of_cache, **self.of_keys)})

    def arguments(self) -> tuple[tuple, dict]:
        """Return the arguments of `stickbreaking_attention_with_kvcache`: (q, caches), and the others by name."""
        tensors, options = self.caches.arguments()
        stored = {name: value is not None for name, value in self.of_keys.items()}
        return tensors, {**options, **self.options, **stored, "query_bias": self.query_bias}

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return o and mass from the oracle, which gets the gate and the biases as the last channels of q and k."""
        exact = CacheCase(**{field: getattr(self.caches, field) for field in ("ends", "s_q", "h", "h_kv", "firsts")})

        def with_channels(x: Tensor, *channels: tuple[Tensor | None, float]) -> Tensor:
            values = [x.new_full(x.shape[:-1], default) if c is None else c for c, default in channels]
            return torch.cat((x.double(), *(value.double()[..., None] for value in values)), dim=-1)

        q = with_channels(self.x.q, (self.query_bias, 0.0))
        k = with_channels(self.x.k, (self.gate, 1.0), (self.key_bias, 0.0))
        exact.x = Inputs(**{**vars(self.x), "q": q, "k": k})
        options = {**self.options, "attend_current": self.caches.attend_current, "return_mass": True}

        def oracle(one: Inputs) -> tuple[Tensor, Tensor]:
            tensors = dict(zip(TENSORS, (one.k[..., -2], one.q[..., -1], one.k[..., -1]), strict=True))
            q, k = one.q[..., :-1], one.k[..., :-2]
            return reference.stickbreaking_attention(q, k, one.v.double(), **tensors, **options)

        return exact.expected(oracle)

    def assert_accurate(self) -> None:
        """Assert that o and mass are within ALLOWED of the oracle. The operator runs first."""
        tensors, options = self.arguments()
        actual = stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True)
        for result, ours, exact in zip(("o", "mass"), actual, self.expected(), strict=True):
            error, allowed = relative_errors(ours, exact)[0], ALLOWED[self.caches.dtype]
            assert error <= allowed, f"{result}: error {error:.3g} is above {allowed:.3g}"


def valid_arguments(ends: tuple[int, int] = (9, 4), d_v: int = 16) -> dict[str, Tensor]:
    """Return the arguments of a call for two sequences of `ends` keys, in contiguous caches of 9 keys."""
    return {
        "q": torch.randn(2, 1, 4, 16),
        "k_cache": torch.randn(2, 9, 2, 16),
        "v_cache": torch.randn(2, 9, 2, d_v),
        "cache_seqlens": torch.tensor(ends, dtype=torch.int32),
    }


def attend(case: CacheCase) -> tuple[Tensor, Tensor]:
    """Return o and mass from the operator."""
    tensors, options = case.arguments()
    return stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True)


def assert_accurate(case: CacheCase) -> None:
    """Assert for o and mass: error <= _FACTOR * error of the plain computation + allowance for rounding and skipping.

    The operator runs first, so that recycled memory of the oracle cannot hold its results.
    """
    actual, plain, oracle = attend(case), case.plain(), case.oracle()
    doubled = 2 if case.dtype == torch.float64 else 1  # the fp64 oracle has rounding errors of the same size
    allowed = {name: doubled * floor for name, floor in floors(case.dtype, case.capacity).items()}
    if rounds_weights(case.x.q):
        # Tensor cores truncate the sums of a logit, always in the same direction. The logarithm of the mass, a sum over
        # all keys, has the same relative error.
        allowed["mass"] += _LOGIT_TRUNCATION * -oracle[1].clamp_min(torch.finfo(torch.float32).tiny).log().min().item()
    for name, ours, theirs, exact in zip(("o", "mass"), actual, plain, oracle, strict=True):
        assert ours.shape == exact.shape, name
        if name == "mass":  # the mass of a used-up row may have any value in [0, threshold]
            used_up = (exact <= case.mass_threshold) & (ours >= 0) & (ours <= case.mass_threshold)
            ours, exact, theirs = (t.masked_fill(used_up, 0.0) for t in (ours, exact, theirs))
        error, bound = relative_errors(ours, exact)[0], relative_errors(theirs.to(ours.dtype), exact)[0]
        bound = _FACTOR * bound + allowed[name] + (4 * case.mass_threshold if name == "o" else 0)
        assert error <= bound, f"{name}: error {error:.3g} is above {bound:.3g}"
