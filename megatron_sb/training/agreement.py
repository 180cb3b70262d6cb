"""What all ranks of a job must have in common: the configuration, and the data.

Under torchrun, each machine reads its own file of the configuration and its own files of the data.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_sb.training.config import TrainingConfig
from megatron_sb.training.documents import checksum_of_ends
from megatron_sb.validation import message_of

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
        fingerprint: of the data, see `task.Task.fingerprint`, and of the files of `fingerprint_of_files`. None if the
            rank cannot run.
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
        if difference := _first_difference(*map(_of_all_machines, (ranks[0].config, found.config)), rank):
            return (
                f"the ranks must have the same configuration, got {difference}. Start every machine with the same file "
                "and the same overrides."
            )
    refusals = [found.refusal for found in ranks if found.refusal is not None]
    if refusals:
        return message_of(refusals[0])
    for rank, found in enumerate(ranks):
        if difference := _first_difference(ranks[0].fingerprint or {}, found.fingerprint or {}, rank):
            return (
                f"the ranks must read the same data, got {difference}. Give every machine the same files; those of "
                "'python-stdlib' and 'python-site-packages' differ between installations."
            )
    return ""


def fingerprint_of_files(config: TrainingConfig, *, starts: bool) -> dict[str, int]:
    """Return numbers that change with the files that the configuration names besides the data: field -> checksum.

    Args:
        config: the configuration.
        starts: whether the run starts from config.initial_checkpoint now.
    """
    files: dict[str, Iterable[Path]] = {}
    if config.evaluation.sentence_pairs:
        files["evaluation.sentence_pairs"] = map(Path, config.evaluation.sentence_pairs)
    if config.initial_checkpoint and (starts or config.is_distilled):  # the teacher is read again
        found = Path(config.initial_checkpoint).rglob("*")
        files["initial_checkpoint"] = sorted(path for path in found if path.is_file())
    return {field: _checksum(paths) for field, paths in files.items()}


def _checksum(paths: Iterable[Path]) -> int:
    checksum = 0
    for path in paths:
        checksum = checksum_of_ends(path, zlib.crc32(path.name.encode(errors="replace"), checksum))
    return checksum


def _of_all_machines(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that must be the same on every machine."""
    return {name: value for name, value in config.items() if not OF_A_MACHINE.fullmatch(name)}


def _first_difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """Return the first entry that differs between rank 0 and a rank, in words, or ""."""
    for name in first | other:
        if first.get(name) != other.get(name):
            return f"{name} = {first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}"
    return ""
