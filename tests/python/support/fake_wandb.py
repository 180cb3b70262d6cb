"""The part of wandb that the trainer uses. It appends its calls to the file FAKE_WANDB_CALLS instead of sending them.

FAKE_WANDB_STOP_AT: the first call of `log` for this step sends SIGINT to the process.
FAKE_WANDB_ERROR: `init` raises an error with this text.
"""

import json
import os
import signal
from pathlib import Path


class Error(Exception):
    """The base class of wandb's errors."""


def _record(call: str, **arguments: object) -> None:
    with Path(os.environ["FAKE_WANDB_CALLS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **arguments}) + "\n")


def _recorded() -> list[dict]:
    path = Path(os.environ["FAKE_WANDB_CALLS"])
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Run:
    """A run with the public attributes of wandb's."""

    def __init__(self, id: str) -> None:
        self.id = id
        steps = [call["step"] for call in _recorded() if call["call"] == "log" and call["id"] == id]
        self.starting_step = max(steps, default=-1) + 1

    def log(self, data: dict, step: int) -> None:
        """Record values. wandb ignores steps that come after a later step."""
        _record("log", id=self.id, data=data, step=step)
        if os.environ.get("FAKE_WANDB_STOP_AT") == str(step):
            del os.environ["FAKE_WANDB_STOP_AT"]
            os.kill(os.getpid(), signal.SIGINT)

    def finish(self) -> None:
        """Record the end of the run."""
        _record("finish", id=self.id)


def init(*, project: str, name: str, dir: str, config: dict, id: str, resume: str) -> Run:
    """Start a run, or continue the run with this id."""
    if "FAKE_WANDB_ERROR" in os.environ:
        raise Error(os.environ["FAKE_WANDB_ERROR"])
    run = Run(id)
    _record("init", project=project, name=name, dir=dir, config=config, id=id, resume=resume)
    return run
