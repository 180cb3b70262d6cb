"""The report of a job, on rank 0: a progress bar, files of metrics and evaluations, plots, and a table at the end.

metrics.jsonl                one line per reported step; model_tflops is per rank, peak_gib is rank 0's,
                             training_seconds is the wall-clock time of the model's steps and checkpoints so far;
                             remainder_by_layer and skipped_tiles_by_layer are those of the step
evaluation/MODEL.STAGE.json  negative log-likelihood by context length; MODEL.STAGE.SCALING.json with scaled positions;
                             MODEL.STAGE.STEP.json and MODEL.STAGE.STEP.SCALING.json after a step before the last one
tensorboard/  loss.png  nll_by_length.png
MODEL/wandb_id  wandb/       the run in Weights & Biases, with `report.wandb`
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_sb.training.checkpoint import Progress, write_atomically
from megatron_sb.training.config import StageConfig, TrainingConfig
from megatron_sb.training.directory import read_metrics
from megatron_sb.training.evaluate import read_result, remove_later_results, result_path
from megatron_sb.training.wandb_runs import WandbRuns
from megatron_sb.validation import finite, naming

LABELS = {
    "stick_breaking": "stick-breaking",
    "softmax_rope": "softmax + RoPE",
}  # other models are labelled by their names


@dataclass(frozen=True)
class Step:
    """The measurements of a training step.

    Attributes:
        loss: in nats per token.
        gradient_norm: before clipping.
        learning_rate: learning rate of the step.
        flops: floating-point operations of the model, over all ranks.
        peak_gib: largest use of this rank's GPU so far, in GiB. None on a CPU.
        remainder: by stick-breaking layer, mean of the mass after all keys of each query. Empty if the step did not
            measure it.
        skipped: by stick-breaking layer, share of tiles that the backward skipped. Empty if the step did not measure
            it, or with context parallelism.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    flops: float
    peak_gib: float | None
    remainder: Sequence[float] = ()
    skipped: Sequence[float] = ()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def hardware(device_type: str, ranks: int) -> str:
    """Describe the hardware of `ranks` processes like this one. device_type: torch's, "cuda" or "cpu"."""
    if device_type == "cuda":
        return f"{ranks} x {torch.cuda.get_device_name()}"
    threads = ranks * torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


class Report:
    """Write the files of a run.

    Args:
        out: the run's directory.
        config: the job's configuration.
        device: the hardware, in words.

    Raises:
        ValueError: `report.wandb` is set, and the package wandb cannot be imported.
    """

    def __init__(self, out: Path, config: TrainingConfig, device: str) -> None:
        self.out = out
        self._device = device
        self._config = config
        self._labels = {model: LABELS.get(model, model) for model in config.compare}
        self._metrics_path = out / "metrics.jsonl"
        self._tensorboard: dict[str, Any] = {}
        self._wandb = WandbRuns(out, config) if config.report.wandb else None
        self._bar: tqdm | None = None
        self._is_drawn = False  # whether the plots show all that is in the files

    def start_stage(self, model: str, stage: StageConfig, progress: Progress) -> None:
        """Open the progress bar. Remove the lines of steps after `progress` from metrics.jsonl, and their evaluations.

        A run that died after its last checkpoint has written them; the resumed run writes them again. They can be of
        later stages, too, if it continues from an older checkpoint.
        """
        if self._wandb:
            self._wandb.open(model)
        later = self._config.stages[self._config.stages.index(stage) + 1 :]
        kept_steps = {stage.name: progress.step} | {each.name: 0 for each in later}
        for each in (stage, *later):
            remove_later_results(self.out, model, each, kept_steps[each.name])
        kept = [
            line
            for line in self.metrics()
            if line["model"] != model or line["step"] <= kept_steps.get(line["stage"], line["step"])
        ]
        write_atomically(self._metrics_path, "".join(json.dumps(line) + "\n" for line in kept))
        label = f"{self._labels[model]} / {stage.name} ({stage.context_length})"
        self._bar = tqdm(
            total=stage.steps, initial=progress.step, desc=label, unit="step", dynamic_ncols=True, mininterval=0.5
        )
        self._last = (time.monotonic(), progress.tokens)
        self._flops = 0.0
        last_line = next((line for line in reversed(kept) if line["model"] == model), {"training_seconds": 0.0})
        self._seconds = last_line.get("training_seconds")  # None: an older version wrote the line

    def step(self, model: str, stage: StageConfig, progress: Progress, step: Step) -> None:
        """Report a finished step. Rates are means over the steps since the last line."""
        assert self._bar is not None
        self._bar.update()
        self._flops += step.flops
        if progress.step % self._config.report.interval and progress.step != stage.steps:
            return
        now = time.monotonic()
        seconds = now - self._last[0]
        rate = (progress.tokens - self._last[1]) / seconds
        tflops = self._flops / seconds / self._config.parallel.ranks / 1e12
        self._last, self._flops = (now, progress.tokens), 0.0
        if self._seconds is not None:
            self._seconds = round(self._seconds + seconds, 3)
        self._bar.set_postfix_str(f"loss {step.loss:.3f}, {rate:,.0f} tokens/s")
        line = {
            "model": model,
            "stage": stage.name,
            "step": progress.step,
            "tokens": progress.tokens,
            "loss": step.loss,
            "gradient_norm": step.gradient_norm,
            "learning_rate": step.learning_rate,
            "training_seconds": self._seconds,
            "tokens_per_second": round(rate, 1),
            "model_tflops": float(f"{tflops:.4g}"),
            "peak_gib": step.peak_gib,
            "mean_remainder": _mean(step.remainder),  # layers have as many rows and tiles
            "skipped_tiles": _mean(step.skipped),
        }
        for name, values in (("remainder", step.remainder), ("skipped_tiles", step.skipped)):
            line |= {f"{name}_by_layer": [*values]} if values else {}
        self._is_drawn = False
        with naming(self._metrics_path), self._metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        values = {name: value for name, value in line.items() if isinstance(value, float)}
        self._write_scalars(model, stage, progress.step, values)

    def end_stage(self) -> None:
        """Close the progress bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def message(self, text: str) -> None:
        """Print text above the progress bar."""
        tqdm.write(text)

    def leave_out(self, seconds: float) -> None:
        """Leave out some time since the last line, in which no step ran, of the rates of the next line."""
        self._last = self._last[0] + seconds, self._last[1]

    def evaluated(self, model: str, stage: StageConfig, step: int, result: dict[str, Any]) -> None:
        """Print one line about the evaluation at one context length."""
        accuracy = f", accuracy {result['accuracy']:.1%}" if "accuracy" in result else ""
        nll = f"negative log-likelihood {result['nll']:.4f}{accuracy}"
        where = "" if step == stage.steps else f", step {step}"
        self.message(f"  {model} / {stage.name}{where}: context {result['context']}, {nll}")

    def evaluation(
        self, model: str, stage: StageConfig, step: int, scaling: str, results: list[dict[str, Any]]
    ) -> None:
        """Write the evaluation after a step.

        scaling: How rotary positions were scaled.
        """
        path = result_path(self.out, model, stage, scaling, step)
        path.parent.mkdir(exist_ok=True)
        self._is_drawn = False
        about = {"model": model, "stage": stage.name, "step": step, "trained_context": stage.context_length}
        about |= {"scaling": scaling, "device": self._device}
        write_atomically(path, json.dumps(finite(about | {"results": results}), indent=1, allow_nan=False))
        suffix = "" if scaling == "none" else f"_{scaling}"
        values = {f"nll_at_{result['context']}{suffix}": result["nll"] for result in results}
        self._write_scalars(model, stage, step, values)
        if step != stage.steps:
            return
        name = f"{stage.name}/nll_by_length{suffix}"
        for result in results:
            self._write_to_tensorboard(model, name, result["nll"], result["context"])

    def metrics(self) -> list[dict[str, Any]]:
        """See `read_metrics`."""
        return read_metrics(self.out)

    def evaluations(self) -> list[dict[str, Any]]:
        """Return every finished evaluation, in the order of the configuration."""
        config = self._config
        entries = [
            read_result(self.out, model, stage, scaling)
            for model in config.compare
            for stage in config.stages
            for scaling in config.evaluated_scalings(model)
        ]
        return [entry for entry in entries if entry is not None]

    def draw(self) -> None:
        """Draw loss.png and nll_by_length.png from the files, unless they show these already."""
        if self._is_drawn:
            return
        from megatron_sb.training import plots

        plots.draw_losses(self.metrics(), self._labels, self.out / "loss.png")
        plots.draw_nll_by_length(self.evaluations(), self._labels, self.out / "nll_by_length.png")
        self._is_drawn = True

    def table(self) -> str:
        """Return a table of the negative log-likelihood by context length, with a column per model and stage."""
        from megatron_sb.training import plots

        evaluations = self.evaluations()
        heads = [f"{plots.label_of(entry, self._labels)}, {entry['stage']}" for entry in evaluations]
        columns = [{result["context"]: f"{result['nll']:.4f}" for result in entry["results"]} for entry in evaluations]
        lines = [" | ".join(["context", *heads])]
        for context in sorted({context for column in columns for context in column}):
            lines.append(
                " | ".join(
                    [
                        f"{context:7d}",
                        *(
                            column.get(context, "").rjust(len(head))
                            for column, head in zip(columns, heads, strict=True)
                        ),
                    ]
                )
            )
        return "\n".join(lines)

    def close(self) -> None:
        """Close the progress bar, the TensorBoard files, and the run in Weights & Biases."""
        self.end_stage()
        if self._wandb:
            self._wandb.finish()
        for writer in self._tensorboard.values():
            writer.close()

    def _write_scalars(self, model: str, stage: StageConfig, step: int, values: dict[str, float]) -> None:
        values = {f"{stage.name}/{name}": value for name, value in values.items()}
        for name, value in values.items():
            self._write_to_tensorboard(model, name, value, step)
        if self._wandb:
            self._wandb.log(model, stage, step, values)

    def _write_to_tensorboard(self, model: str, name: str, value: float, step: int) -> None:
        if not self._config.report.tensorboard:
            return
        if model not in self._tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard[model] = SummaryWriter(str(self.out / "tensorboard" / model))
        self._tensorboard[model].add_scalar(name, value, step)
