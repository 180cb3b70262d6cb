"""What all ranks of a job must have in common: the configuration, and the data.

Under torchrun, each machine reads its own file of the configuration and its own files of the data.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Fields that can differ between machines: paths, whose data are compared instead, and threads, which torchrun sets.
OF_A_MACHINE = re.compile(
    r"data\.(paths|validation_paths|index_folder)|initial_checkpoint|evaluation\.sentence_pairs"
    r"|parallel\.threads_per_rank"
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rank has found at the start of a job.

    Attributes:
        config: the configuration, as `config.flatten` returns it.
        fingerprint: of the data; see `task.Task.fingerprint`. None if the rank cannot run.
        refusal: why the rank cannot run, or None.
    """

    config: Mapping[str, Any]
    fingerprint: Mapping[str, int] | None
    refusal: Exception | None


def reason_to_refuse(ranks: Sequence[Found]) -> str:
    """Return why these ranks cannot train together, in one sentence or two, or "" if they can.

    Another configuration comes first, because it can be the cause of a refusal.

    Example:
        >>> one, other = (Found({"seed": seed}, {"checksum": 5}, None) for seed in (1, 2))
        >>> reason_to_refuse([one, other])
        'the ranks must have the same configuration, got seed = 1 on rank 0 and 2 on rank 1. Start every machine with \
the same file and the same overrides.'
    """
    for rank, found in enumerate(ranks):
        if difference := _first_difference(ranks[0].config, found.config, rank):
            return (
                f"the ranks must have the same configuration, got {difference}. Start every machine with the same file "
                "and the same overrides."
            )
    refusals = [found.refusal for found in ranks if found.refusal is not None]
    if refusals:
        return str(refusals[0])
    for rank, found in enumerate(ranks):
        if difference := _first_difference(ranks[0].fingerprint or {}, found.fingerprint or {}, rank):
            return (
                f"the ranks must read the same data, got {difference}. Give every machine the same files; those of "
                "'python-stdlib' and 'python-site-packages' differ between installations."
            )
    return ""


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """Return the first entry that differs between rank 0 and a rank, in words, or ""."""
    for name in first | other:
        if first.get(name) != other.get(name) and not OF_A_MACHINE.fullmatch(name):
            return f"{name} = {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}"
    return ""
