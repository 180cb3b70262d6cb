"""Runs of Weights & Biases (`report.wandb`): one for each model of the job, which a resumed job continues."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Any

from megatron_sb.training.checkpoint import write_atomically
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.validation import InputError

ID_FILE = "wandb_id"  # in the model's folder: the id of its run


class WandbError(InputError):
    """wandb cannot be imported, or cannot start a run."""


class WandbRuns:
    """Log the metrics of a job to Weights & Biases.

    The environment variables of wandb apply, for example WANDB_MODE, WANDB_ENTITY and WANDB_API_KEY.

    Args:
        out: the run's directory. wandb writes to its folder `wandb`.
        config: the job's configuration. `report.wandb` names the project.

    Raises:
        WandbError: The package wandb cannot be imported.
    """

    def __init__(self, out: Path, config: TrainingConfig) -> None:
        try:
            from wandb import Error, init  # an empty folder `wandb` can be imported, too, but does not have them
        except ImportError as error:
            raise WandbError(
                f"report.wandb = {config.report.wandb!r} needs the package wandb, which cannot be imported ({error}). "
                "Run: pip install wandb"
            ) from error
        self._init, self._error = init, Error
        self._out = out
        self._config = config
        self._model = ""
        self._run: Any = None  # of self._model. Only one run is open, because models are trained one after the other.

    def open(self, model: str) -> None:
        """Start or continue the run of a model, and finish that of another model.

        Raises:
            WandbError: wandb cannot start the run, for example because the user is not logged in.
        """
        if model == self._model:
            return
        self.finish()
        path = self._out / model / ID_FILE
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, secrets.token_hex(8))
        try:
            self._run = self._init(
                project=self._config.report.wandb,
                name=f"{self._out.resolve().name} {model}",
                dir=str(self._out),
                config={**dataclasses.asdict(self._config), "trained_model": model},
                id=path.read_text(encoding="utf-8"),
                resume="allow",
            )
        except self._error as error:
            raise WandbError(
                f"report.wandb = {self._config.report.wandb!r}: wandb cannot start a run: {error} "
                "Set WANDB_MODE=offline to log to files only."
            ) from error
        self._model = model

    def log(self, model: str, stage: StageConfig, step: int, values: dict[str, float]) -> None:
        """Log values after a step of a stage.

        wandb counts the steps of all stages. It ignores steps before the newest one that it has. A resumed job may
        repeat the newest one, for example to evaluate it. These values are added to the next step.
        """
        self.open(model)
        stages = self._config.stages
        number = step + sum(before.steps for before in stages[: stages.index(stage)])
        first = self._run.starting_step  # of this job; 0, or the number after the newest step
        if number >= first - 1:
            self._run.log(values, step=max(number, first))

    def finish(self) -> None:
        """Finish the open run."""
        if self._run is not None:
            self._run.finish()
        self._run, self._model = None, ""
