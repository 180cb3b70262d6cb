"""A window of training steps under torch's profiler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


class ProfilerWindow:
    """Profiles steps `first` to `last` (from 1, both included) of each stage and writes DIR/MODEL.STAGE.json, a trace
    that chrome://tracing and Perfetto read.

    first = 0: profiles nothing.
    """

    def __init__(self, directory: Path, first: int = 0, last: int = 0) -> None:
        self._directory, self._first, self._last = directory, first, last
        self._profiler: Any = None

    @staticmethod
    def parse(text: str, num_steps: int) -> tuple[int, int]:
        """("3:5", 9) -> (3, 5). Raises ValueError for what is not two steps in order, or begins after num_steps."""
        match = re.fullmatch(r"(\d+):(\d+)", text)
        first, last = (int(number) for number in match.groups()) if match else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"--profile {text}: write FIRST:LAST, steps of a stage from 1, for example 10:12")
        if first > num_steps:
            raise ValueError(f"--profile {text}: no stage has so many steps; FIRST may be up to {num_steps}")
        return first, last

    def before(self, step: int) -> None:
        """Call before step `step` (from 1) of a stage."""
        if step == self._first:
            import torch

            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after(self, step: int, model: str, stage: str) -> None:
        """Call after it."""
        if self._profiler is not None and step == self._last:
            self._end(model, stage)

    def end_stage(self, model: str, stage: str) -> None:
        """Write what there is, where the stage ended inside the window."""
        if self._profiler is not None:
            self._end(model, stage)

    def _end(self, model: str, stage: str) -> None:
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{model}.{stage}.json"
        aside = path.with_name(f".{path.name}")
        self._profiler.export_chrome_trace(str(aside))
        aside.replace(path)
        self._profiler = None
