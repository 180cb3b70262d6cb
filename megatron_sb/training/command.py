"""The command line of a job, which every rank gets."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from megatron_sb.training.supervisor import PARENT_PIPE


@dataclass(frozen=True)
class Command:
    """The arguments of `training.launch.main`.

    Attributes:
        config_path: as in `main`.
        overrides: as in `main`.
        out: as in `main`.
        resume: as in `main`.
        profiled: first and last step to profile, (0, 0) for none.
    """

    config_path: str
    overrides: tuple[str, ...]
    out: str | None
    resume: bool
    profiled: tuple[int, int]

    def to_resume(self, directory: Path) -> str:
        """Return the command that resumes the run in `directory`. Under torchrun it lacks torchrun's own options."""
        rest = ["--out", str(directory), "--resume"]
        if PARENT_PIPE not in os.environ:
            return "torchrun ... -m megatron_sb.training " + shlex.join([self.config_path, *self.overrides, *rest])
        changes = [f"--set={override}" for override in self.overrides]
        return "megatron-sb train " + shlex.join([self.config_path, *changes, *rest])
