"""KV caches for tests: valid keys where a call may read, NaN everywhere else."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_sb import reference, stickbreaking_attention_with_kvcache

from .accuracy import floors, plain_attention, relative_errors
from .inputs import Inputs, make_inputs
from .rounded import rounded_results, rounds_weights

_FACTOR = 2.0
_LOGIT_CUT_OFF = 2.0**-22  # relative


@dataclass
class CacheCase:
    """Sequences with keys [firsts[i], ends[i]) each in a cache of `capacity` keys, and the s_q last queries of each."""

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
    x: Inputs = field(init=False)  # (b, s_q or capacity, ..): all positions, valid or not

    def __post_init__(self) -> None:
        self.capacity = self.capacity or max(self.ends)
        sizes = {"h": self.h, "h_kv": self.h_kv, "d": self.d, "d_v": self.d_v, "dtype": self.dtype, "seed": self.seed}
        self.x = make_inputs(self.regime, b=len(self.ends), s=self.s_q, s_k=self.capacity, **sizes)

    def arguments(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
        """Of `stickbreaking_attention_with_kvcache`: the tensors, and the rest by name."""
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
        """The caches cut into blocks that lie in no order, three of them unused; entries that nobody needs are wild."""
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
        """o and mass of attention(inputs) -> (o, mass), sequence by sequence; 0 and 1 before their beginnings."""
        o = torch.zeros(*self.x.q.shape[:3], self.x.v.shape[-1], dtype=torch.float64)
        mass = torch.ones(self.x.q.shape[0], self.h, self.s_q, dtype=torch.float64)
        for i, end in enumerate(self.ends):
            first = self.firsts[i] if self.firsts else 0
            queries = min(self.s_q, end - first)
            if queries == 0:
                continue
            x, mine, keys = self.x, slice(self.s_q - queries, None), slice(first, end)
            one = Inputs(x.q[i, None, mine], x.k[i, None, keys], x.v[i, None, keys], x.do[i, None, mine], x.dmass)
            one.dmass = x.dmass[i, None, :, mine]
            found = attention(one)
            o[i, mine], mass[i, :, mine] = found[0][0].double(), found[1][0].double()
        return o, mass

    def oracle(self) -> tuple[Tensor, Tensor]:
        """What float64 gives."""

        def exact(one: Inputs) -> tuple[Tensor, Tensor]:
            options = {"attend_current": self.attend_current, "return_mass": True}
            return reference.stickbreaking_attention(one.q.double(), one.k.double(), one.v.double(), **options)

        return self.expected(exact)

    def plain(self) -> tuple[Tensor, Tensor]:
        """What a plain computation in the same precision gives, or an exact one that rounds as kernels have to."""

        def rounded(one: Inputs) -> tuple[Tensor, Tensor]:
            results = rounded_results(one, attend_current=self.attend_current)
            return results["o"], results["mass"]

        def by_definition(one: Inputs) -> tuple[Tensor, Tensor]:
            return plain_attention(one.q, one.k, one.v, attend_current=self.attend_current)

        return self.expected(rounded if rounds_weights(self.x.q) else by_definition)


def attend(case: CacheCase) -> tuple[Tensor, Tensor]:
    """o and mass as the operator gives them."""
    tensors, options = case.arguments()
    return stickbreaking_attention_with_kvcache(*tensors, **options, return_mass=True)


def assert_accurate(case: CacheCase) -> None:
    """The operator, which runs first, is at most a factor further from float64 than the plain computation."""
    actual, plain, oracle = attend(case), case.plain(), case.oracle()
    doubled = 2 if case.dtype == torch.float64 else 1  # the oracle rounds as much
    allowed = {name: doubled * floor for name, floor in floors(case.dtype, case.capacity).items()}
    if rounds_weights(case.x.q) and case.x.q.is_cuda:
        # Tensor cores cut off the sums of a logit's products, all in one direction: the mass, a product over all keys,
        # is off by as much of its logarithm.
        allowed["mass"] += _LOGIT_CUT_OFF * -oracle[1].clamp_min(torch.finfo(torch.float32).tiny).log().min().item()
    for name, ours, theirs, exact in zip(("o", "mass"), actual, plain, oracle, strict=True):
        assert ours.shape == exact.shape, name
        if name == "mass":  # once used up, somewhere in [0, threshold]
            used_up = (exact <= case.mass_threshold) & (ours >= 0) & (ours <= case.mass_threshold)
            ours, exact, theirs = (t.masked_fill(used_up, 0.0) for t in (ours, exact, theirs))
        error, bound = relative_errors(ours, exact)[0], relative_errors(theirs.to(ours.dtype), exact)[0]
        bound = _FACTOR * bound + allowed[name] + (4 * case.mass_threshold if name == "o" else 0)
        assert error <= bound, f"{name}: error {error:.3g} is above {bound:.3g}"
