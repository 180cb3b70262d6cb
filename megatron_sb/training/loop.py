"""The training loop of every rank: each model through each stage, with a checkpoint and an evaluation at a stage's end.

A stage with another model or layout than the stage before starts from that stage's checkpoint. A resumed job starts
from the newest checkpoint, by the same code. Otherwise the engine of the stage before trains on.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megatron_sb.processes import garbage_collection_paused
from megatron_sb.training.checkpoint import CheckpointDirectory, Progress, agreed, load
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.data import rows_ahead
from megatron_sb.training.evaluate import Watch, read_result
from megatron_sb.training.profiler import ProfilerWindow
from megatron_sb.training.report import Report, Step
from megatron_sb.training.schedule import learning_rate
from megatron_sb.training.supervisor import STOP_SIGNALS, note_checkpoint, signals_to_note
from megatron_sb.training.task import Sampler, Task, load_task
from megatron_sb.training.throughput import model_flops
from megatron_sb.validation import InputError, read_json_object


def import_engine() -> Any:
    """Return the class `Engine`, imported without flash-linear-attention.

    Megatron-Core imports that package, if it is installed, for its own gated delta nets, which no model of the trainer
    has. The import takes ten seconds, because it includes transformers. The trainer's `GatedDeltaNet` imports it later.
    """
    hidden = "fla" not in sys.modules
    if hidden:
        sys.modules["fla"] = None  # type: ignore[assignment]  # to import it is then an ImportError
    try:
        with garbage_collection_paused():
            from megatron_sb.training.engine.engine import Engine
    finally:
        if hidden:
            del sys.modules["fla"]
    return Engine


class Interrupted(Exception):
    """A signal stopped the job, which has saved. args: the signal, and the position in words."""


class Diverged(Exception):
    """The loss or the gradient of a step is not finite. Raised on every rank. args: a sentence."""


class StopRequest:
    """Record the signals of STOP_SIGNALS, except SIGHUP under nohup.

    Each step sums the flags of all ranks in a collective. All ranks therefore stop after the same step.
    """

    def __init__(self) -> None:
        self._received = dict.fromkeys(STOP_SIGNALS, 0.0)
        for number in signals_to_note():
            signal.signal(number, self._note)

    def flags(self) -> list[float]:
        """Return 1.0 for each of STOP_SIGNALS that this rank has received, else 0.0."""
        return list(self._received.values())

    @staticmethod
    def agreed(sums: list[float]) -> signal.Signals | None:
        """Return a signal that any rank has received, from the sums of all ranks' flags."""
        return next((number for number, count in zip(STOP_SIGNALS, sums, strict=True) if count), None)

    def _note(self, number: int, frame: Any) -> None:
        self._received[number] = 1.0


class Job:
    """One rank's part of a run.

    Args:
        config: the job's configuration.
        out: the run's directory.
        device: this rank's device.
        report: None on every rank but the first.
        profiler: None on every rank but the first.

    Raises:
        ValueError: The data cannot be used, or differ from the data that the run has been trained on.
    """

    def __init__(
        self,
        config: TrainingConfig,
        out: Path,
        device: torch.device,
        report: Report | None,
        profiler: ProfilerWindow | None = None,
    ) -> None:
        self._config = config
        self._out = out
        self._device = device
        self._report = report
        self._profiler = profiler or ProfilerWindow(out)
        self._stop = StopRequest()
        self._engine: Any = None  # of the model and the stage that are trained now
        self._task: Task = load_task(config)
        for model in config.compare:
            self._refuse_other_data(model)

    def describe(self) -> str:
        """Describe the data in one sentence."""
        return self._task.describe()

    def fingerprint(self) -> dict[str, int]:
        """See `task.Task.fingerprint`."""
        return self._task.fingerprint()

    def _refuse_other_data(self, model: str) -> None:
        """Raise ValueError if a model has been trained on other data, also if it left results and no checkpoint."""
        directory, now = self._checkpoints(model), self._task.fingerprint()
        if progress := directory.latest():
            before, changed = progress.corpus, f"the data changed after {directory.path(progress)} was saved"
        elif self._is_finished(model) and (record := self._out / "data.json").exists():
            before = read_json_object(record).get("fingerprint", {})
            changed = f"the data changed after {model} was trained in {self._out}"
        else:
            return
        if any(now.get(name) != value for name, value in before.items()):  # an older run's may lack names
            raise InputError(
                f"{changed}: the fingerprint must be {before}, got {now}. Restore the data, or start a new run."
            )

    def run(self) -> None:
        """Train and evaluate every model and stage that is not done yet.

        Raises:
            Interrupted: A signal asked for a stop. The job has saved.
            Diverged: The loss or gradient of a step is not finite. That step is not saved.
        """
        for model in self._config.compare:
            if agreed(lambda model=model: self._is_finished(model)):
                continue
            directory = self._checkpoints(model)
            progress = agreed(directory.latest)
            if progress and self._report:
                note_checkpoint(directory.path(progress))
            names = [stage.name for stage in self._config.stages]
            for index, stage in enumerate(self._config.stages):
                if progress is not None and names.index(progress.stage) > index:
                    continue
                progress = self._run_stage(model, index, stage, directory, progress)
            self._close_engine()

    def _is_finished(self, model: str) -> bool:
        """Return whether nothing is left to do for a model whose last steps need no checkpoint.

        Its newest checkpoint is older than its results, so a resumed job would train these steps again.
        """
        last = self._config.stages[-1]
        return not self._config.checkpoint.stage_ends and not self._scalings_to_evaluate(model, last, last.steps)

    def _checkpoints(self, model: str) -> CheckpointDirectory:
        return CheckpointDirectory(self._out / model / "checkpoints", self._config.checkpoint.keep)

    def _run_stage(
        self, model: str, index: int, stage: StageConfig, directory: CheckpointDirectory, progress: Progress | None
    ) -> Progress:
        """Train the remaining steps of a stage, then evaluate unless that is done."""
        trained = progress is not None and (progress.stage, progress.step) == (stage.name, stage.steps)
        if trained and not agreed(lambda: self._scalings_to_evaluate(model, stage, stage.steps)):
            return progress
        task = self._task
        engine = self._engine_for(model, stage, directory, progress)
        sampler = task.sampler(stage, index)
        if progress is not None and progress.stage == stage.name:
            sampler.load_state_dict(progress.sampler)
        else:
            tokens = progress.tokens if progress is not None else 0
            progress = Progress(stage.name, 0, tokens, sampler.state_dict(), task.fingerprint())
        progress = self._train(model, stage, engine, sampler, directory, progress)
        self._evaluate(model, stage, engine, directory, progress)
        return progress

    def _engine_for(
        self, model: str, stage: StageConfig, directory: CheckpointDirectory, progress: Progress | None
    ) -> Any:
        """Return an engine for a stage with the weights of `progress`: that of the stage before, if it fits."""
        if self._engine is not None and self._engine.fits(stage):
            return self._engine
        self._close_engine()
        engine = import_engine()(self._config, model, stage, self._task.vocab_size, self._device)
        if progress is not None:
            directory.load(engine, progress)
        elif self._config.initial_checkpoint:
            load(engine, Path(self._config.initial_checkpoint))
        self._engine = engine
        return engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _train(
        self,
        model: str,
        stage: StageConfig,
        engine: Any,
        sampler: Sampler,
        directory: CheckpointDirectory,
        progress: Progress,
    ) -> Progress:
        config = self._config
        if self._report:
            self._report.start_stage(model, stage, progress)
            if missed := self._profiler.missed(progress.step):
                self._report.message(f"  {model} / {stage.name}: {missed}")
        self._evaluate_within(model, stage, engine, directory, progress)  # a run may have ended while it evaluated
        share_of_rows = engine.data_parallel_rank, engine.data_parallel_size, stage.rows_per_micro_batch
        for step in rows_ahead(sampler, stage.rows_per_step, stage.steps - progress.step, *share_of_rows):
            num_tokens = sum(row.num_tokens for row in step.rows)
            self._profiler.before(progress.step + 1)
            rate = learning_rate(stage, progress.step)
            every = config.report.attention_interval
            observe = config.has_sticks(model) and every > 0 and (progress.step + 1) % every == 0
            num_inputs = sum(int(row.cu_seqlens[-1]) for row in step.rows)
            share, norm = engine.train_step(
                step.micro_batches, num_tokens, rate, num_inputs=num_inputs, observe=observe
            )
            own = torch.tensor([norm, *self._stop.flags()], dtype=torch.float64, device=share.device)
            counts = engine.attention_counts.stack()
            sums = engine.sum_over_ranks(torch.cat([share[None], own, counts.flatten()]))
            loss, norms, *flags = sums[: 1 + len(own)].tolist()
            if not math.isfinite(loss) or not math.isfinite(norms):
                raise Diverged(_how_it_diverged(model, stage, progress.step + 1, loss, norms, directory))
            stop = StopRequest.agreed(flags)
            epoch = step.sampler.get("epoch", 0)
            if self._report and epoch > progress.sampler.get("epoch", 0):
                self._report.message(f"  {model} / {stage.name}: epoch {epoch + 1} begins at step {progress.step + 1}")
            progress = Progress(
                stage.name, progress.step + 1, progress.tokens + num_tokens, step.sampler, progress.corpus
            )
            self._profiler.after(progress.step, model, stage.name)
            if self._report:
                flops = model_flops(config, model, self._task.vocab_size, [row.cu_seqlens for row in step.rows])
                sticks = _shares(sums[1 + len(own) :].view(counts.shape)) if observe else ()
                self._report.step(
                    model, stage, progress, Step(loss, norm, rate, flops, _peak_gib(self._device), *sticks)
                )
            if stop or self._is_saved(stage, engine, progress.step):
                saved = directory.save(engine, progress)
                if self._report:
                    note_checkpoint(saved)
            if stop:
                self._profiler.end_stage(model, stage.name)
                raise Interrupted(stop, f"at step {progress.step} of {model} / {stage.name}; saved {saved}")
            self._evaluate_within(model, stage, engine, directory, progress)
        self._profiler.end_stage(model, stage.name)
        if self._report:
            self._report.end_stage()
        return progress

    def _is_saved(self, stage: StageConfig, engine: Any, step: int) -> bool:
        """Return whether the model is saved after a step, also without a request to stop."""
        checkpoint, stages = self._config.checkpoint, self._config.stages
        if step % checkpoint.interval == 0:
            return True
        if step < stage.steps:
            return False
        following = stages[stages.index(stage) + 1 :][:1]
        return checkpoint.stage_ends or not all(map(engine.fits, following))

    def _scalings_to_evaluate(self, model: str, stage: StageConfig, step: int) -> list[str]:
        if self._config.evaluation.last_stage_only and stage != self._config.stages[-1]:
            return []
        scalings = self._config.evaluated_scalings(model)
        return [scaling for scaling in scalings if read_result(self._out, model, stage, scaling, step) is None]

    def _evaluate_within(
        self, model: str, stage: StageConfig, engine: Any, directory: CheckpointDirectory, progress: Progress
    ) -> None:
        """Evaluate if the configuration asks for it after this step, which is not the last one."""
        interval, step = self._config.evaluation.interval, progress.step
        if interval is None or step % interval or not 0 < step < stage.steps:
            return
        began = time.monotonic()
        self._evaluate(model, stage, engine, directory, progress)
        if self._report:
            self._report.leave_out(time.monotonic() - began)

    def _evaluate(
        self, model: str, stage: StageConfig, engine: Any, directory: CheckpointDirectory, progress: Progress
    ) -> None:
        """Evaluate what is not evaluated yet."""
        step = progress.step

        def on_length(result: dict[str, Any]) -> None:
            if self._report:
                self._report.evaluated(model, stage, step, result)

        def on_batch() -> None:
            sums = engine.sum_over_ranks(torch.tensor(self._stop.flags(), dtype=torch.float64))
            if stop := StopRequest.agreed(sums.tolist()):
                saved = directory.save(engine, progress)
                raise Interrupted(stop, f"while evaluating step {step} of {model} / {stage.name}; saved {saved}")

        scalings = agreed(lambda: self._scalings_to_evaluate(model, stage, step))
        for scaling in scalings:
            results = self._task.evaluate(engine, stage, scaling, Watch(on_length, on_batch))
            if self._report:
                self._report.evaluation(model, stage, step, scaling, results)
        if scalings and self._report:
            self._report.draw()


def _how_it_diverged(
    model: str, stage: StageConfig, step: int, loss: float, norms: float, directory: CheckpointDirectory
) -> str:
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norms}"
    newest = directory.latest()
    left = f"the newest checkpoint is {directory.path(newest)}" if newest else "no checkpoint was saved before"
    where = f"step {step} of {model} / {stage.name}"
    return f"{what} at {where}: training has diverged and ends without saving this step; {left}"


def _shares(counts: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the mean remaining mass and the share of skipped tiles by layer. counts: `AttentionCounts.stack`."""
    remainder, rows, skipped, tiles = counts
    return (remainder / rows).tolist(), (skipped / tiles).tolist() if tiles.all() else []


def _peak_gib(device: torch.device) -> float | None:
    """Return the largest memory of this rank's tensors on a GPU so far, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
