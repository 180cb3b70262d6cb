"""Profiling of some training steps with torch's profiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron_sb.validation import InputError


class ProfilerWindow:
    """Profile a range of steps of each stage into DIR/MODEL.STAGE.json, for chrome://tracing or Perfetto.

    A resumed stage that starts within the range profiles the steps that are left.

    Args:
        directory: DIR.
        first: first step to profile, from 1. 0 profiles nothing.
        last: last step to profile, included.
    """

    def __init__(self, directory: Path, first: int = 0, last: int = 0) -> None:
        self._directory, self._first, self._last = directory, first, last
        self._profiler: Any = None

    @staticmethod
    def parse(text: str, num_steps: int) -> tuple[int, int]:
        """Return the steps that "FIRST:LAST" names.

        Raises:
            ValueError: `text` is not two steps in order, or starts after `num_steps`.
        """
        match = re.fullmatch(r"(\d+):(\d+)", text)
        first, last = (int(number) for number in match.groups()) if match else (0, 0)
        if not 1 <= first <= last:
            raise InputError(f"--profile must be FIRST:LAST, two steps of a stage such as 10:12, got {text!r}")
        if first > num_steps:
            raise InputError(
                f"--profile must start at step {num_steps} or before, the last step of the longest stage, got {text!r}"
            )
        return first, last

    def missed(self, finished: int) -> str:
        """Return which steps to profile a stage has finished before this job, in words; "" if none is missing.

        finished: number of the stage's finished steps.
        """
        if not self._first or finished < self._first:
            return ""
        last = min(self._last, finished)
        steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
        return f"{steps} of --profile {self._first}:{self._last} had ended before this job and cannot be profiled"

    def before(self, step: int) -> None:
        """Start the profiler at the first step to profile that this job trains. Call before each step, from 1."""
        if self._profiler is None and self._first <= step <= self._last:
            import torch

            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after(self, step: int, model: str, stage: str) -> None:
        """Write the trace if `step` is the last step to profile. Call after the step."""
        if self._profiler is not None and step == self._last:
            self._end(model, stage)

    def end_stage(self, model: str, stage: str) -> None:
        """Write the trace if the stage ended before the last step to profile."""
        if self._profiler is not None:
            self._end(model, stage)

    def _end(self, model: str, stage: str) -> None:
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{model}.{stage}.json"
        temporary = path.with_name(f".{path.name}")
        self._profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
        self._profiler = None
