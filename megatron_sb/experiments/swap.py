"""Give a trained model with RoPE stick-breaking attention, and train on with few tokens.

The only model of `compare` is the base: softmax with RoPE. Every other run starts from the weights of its last
checkpoint and trains on with a share of its tokens:

rope, drope                  softmax as before, and without positions (DroPE)
whole, whole_distilled       stick-breaking: all weights learn the tokens, or the base's distribution of the next token
layers, layers_distilled     stick-breaking: first every attention learns the output of the base's, then as above

A run starts when the base is finished. Runs with the same share read the same text, with which the base began.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from megatron_sb.experiments import swap_tables, sweep
from megatron_sb.experiments.swap_tables import DROPE
from megatron_sb.experiments.sweep import Trial
from megatron_sb.experiments.verdict import check_scalings, nll_at
from megatron_sb.training.checkpoint import newest_checkpoint
from megatron_sb.training.config import (
    AttentionConfig,
    ConfigError,
    GatedDeltaNetConfig,
    SoftmaxAttentionConfig,
    StageConfig,
    TrainingConfig,
    load_config,
)
from megatron_sb.training.initial_checkpoint import OWN_WEIGHTS, without
from megatron_sb.validation import InputError

# Recipe -> the loss of each stage.
RECIPES: dict[str, tuple[str, ...]] = {
    "rope": ("tokens",),
    DROPE: ("tokens",),
    "whole": ("tokens",),
    "whole_distilled": ("logits",),
    "layers": ("layers", "tokens"),
    "layers_distilled": ("layers", "logits"),
}
SOFTMAX_RECIPES = ("rope", DROPE)
WARM_UP = 0.1  # share of a stage's steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], metavar="NAME", help="recipes (default: all)"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=["stick_breaking", "stick_breaking_reach"],
        metavar="NAME",
        help="entries of attention that replace softmax (default: stick_breaking stick_breaking_reach)",
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.01, 0.05],
        metavar="SHARE",
        help="tokens of a run as shares of the base's (default: 0.01 0.05)",
    )
    parser.add_argument(
        "--rate-factors",
        type=float,
        nargs="+",
        default=[1.0],
        metavar="FACTOR",
        help="learning rates as multiples of the base's last one; the table has the best one (default: 1.0)",
    )
    parser.add_argument(
        "--layers-share",
        type=float,
        default=0.4,
        metavar="SHARE",
        help="share of a run's steps that learn layer by layer, with such a recipe (default: %(default)s)",
    )
    parser.add_argument(
        "--keep-checkpoints",
        action="store_true",
        help="keep the checkpoints of all finished runs (default: only those of the base)",
    )
    sweep.add_time_limit_arguments(parser)
    sweep.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train what is not trained yet, then write the results, also if a time limit or a signal stops the runs.

    Return the exit status.
    """
    limit = sweep.limit_of(options)
    swap = Swap(options, sweep.output_folder(options))
    try:
        swap.train(options.jobs, limit)
    except sweep.SweepStopped:
        swap.write()
        raise
    swap.write()
    return 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A trial with its configuration, and what it is about.

    Attributes:
        recipe: "base", or a name in RECIPES.
        model: entry of attention.
        share: tokens, as a share of the base's.
        factor: learning rate, as a multiple of the base's.
        trial: the run of the sweep.
        config: the trial's configuration.
    """

    recipe: str
    model: str
    share: float
    factor: float
    trial: Trial
    config: TrainingConfig


class Swap:
    """The runs of the experiment, and what they have measured so far.

    Args:
        options: of the command.
        out: folder of the runs.

    Raises:
        ValueError: an option or the configuration is invalid.
    """

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.config = load_config(options.config, options.set)
        self._options, self._out = options, out
        self._check_options()
        self._check_config()
        (self.base_model,) = self.config.compare
        overrides = (*options.set, "checkpoint.stage_ends=true")
        trial = Trial("base", overrides)
        self.base = Run("base", self.base_model, 1.0, 1.0, trial, trial.config(options.config))
        self._known: list[Run] = []
        self._runs_from(out / "unknown")  # raises an error for a run that is invalid

    def _check_options(self) -> None:
        options = self._options
        if not all(0 < share <= 1 for share in options.shares):
            raise InputError(f"--shares must be above 0 and at most 1, got {options.shares}.")
        if not all(0 < factor < math.inf for factor in options.rate_factors):
            raise InputError(f"--rate-factors must be above 0 and finite, got {options.rate_factors}.")
        sweep.check_jobs(options.jobs, [self.config])  # the base is trained without it, for hours
        sweep.check_numbers("--shares", options.shares)
        sweep.check_numbers("--rate-factors", options.rate_factors)
        if not 0 < options.layers_share < 1:
            raise InputError(f"--layers-share must be between 0 and 1, got {options.layers_share}.")
        sticks = [name for name, entry in self.config.attention.items() if entry.kind != "softmax"]
        base = self.config.attention[self.config.compare[0]]
        for arm in options.arms if {*options.recipes} - {*SOFTMAX_RECIPES} else ():
            if arm not in sticks:
                raise InputError(
                    f"--arms must name entries of attention of other kinds than softmax, which are {sticks}, "
                    f"got {arm!r}."
                )
            check_scalings(self.config, [arm])
            for name in dict.fromkeys(self.config.layers_of(arm)):
                self._check_layer(name, base)

    def _check_layer(self, name: str, base: AttentionConfig) -> None:
        """Check that a layer of an arm can start from the weights of the base, before the base is trained."""
        entry = self.config.attention[name]
        if isinstance(entry, GatedDeltaNetConfig):
            raise InputError(
                f"attention.{name}.kind must be 'stick_breaking' or 'softmax' in an arm, because the base has no "
                f"weights for other kinds, got {entry.kind!r}."
            )
        for option, value in OWN_WEIGHTS:
            if getattr(entry, option, None) == value != getattr(base, option, None):
                raise InputError(
                    f"attention.{name}.{option} must be {without(value)} in an arm, because the base has no weights "
                    f"for it, got {value!r}."
                )

    def _check_config(self) -> None:
        config = self.config
        if config.data.kind == "recall":
            raise ConfigError("data.kind must be a kind of text for swap, got 'recall'.")
        attention = config.attention[config.compare[0]]
        if len(config.compare) > 1 or not isinstance(attention, SoftmaxAttentionConfig) or attention.position != "rope":
            raise ConfigError(f"compare must name one softmax model with rotary positions, got {[*config.compare]}.")
        check_scalings(config, config.compare)
        last = config.stages[-1]
        if last.context_length not in config.evaluation_lengths(last):
            raise ConfigError(
                f"the context_length of stage {last.name} must be evaluation.target_tokens times a power of 2, got "
                f"{last.context_length} and {config.evaluation.target_tokens}."
            )

    def train(self, jobs: int, limit: sweep.TimeLimit) -> None:
        """Train until no run is left. Raise `sweep.SweepStopped` if a run fails, or a signal or the limit ends it."""
        path, keep = self._options.config, self._options.keep_checkpoints
        sweep.train_all(path, [self.base.trial], self._out, jobs, limit)
        trials = [run.trial for run in self.known_runs()]
        sweep.train_all(path, trials, self._out, jobs, limit, keep_checkpoints=keep)

    def write(self) -> None:
        """Write the results to the output folder, if there are any."""
        results = self.results()
        if results["base"]:
            swap_tables.write(self._out, self.config, results)

    def known_runs(self) -> list[Run]:
        """Return the runs that start from the base, those with the fewest tokens first; none before it is finished."""
        if not self._known and self._is_done(self.base):
            checkpoint = newest_checkpoint(self._out / "base" / self.base_model / "checkpoints")
            self._known = self._runs_from(checkpoint.resolve())
        return self._known

    def results(self) -> dict[str, Any]:
        """Return what the finished runs have measured.

        Returns:
            {"base": a measured run or None, "recalibrated": [measured runs], "runs": {"finished", "known"}}. A measured
            run is {"recipe", "model", "share", "factor", "rate", "tokens", "device", "evaluations", "best"}. "best":
            whether its learning rate is the best one of its recipe, model and share so far.
        """
        base = self._measured(self.base) | {"best": True} if self._is_done(self.base) else None
        known = self.known_runs()
        done = [run for run in known if self._is_done(run)]
        best: dict[tuple, tuple[float, str]] = {}
        for run in done:
            key, found = (run.recipe, run.model, run.share), (self._nll(run), run.trial.name)
            best[key] = min(best.get(key, found), found)
        names = {name for _, name in best.values()}
        measured = [self._measured(run) | {"best": run.trial.name in names} for run in done]
        counts = {"finished": len(done) + (base is not None), "known": len(known) + 1}
        return {"base": base, "recalibrated": measured, "runs": counts}

    def _models_of(self, recipe: str) -> list[str]:
        softmax = {"rope": self.base_model, DROPE: DROPE}
        return [softmax[recipe]] if recipe in softmax else list(dict.fromkeys(self._options.arms))

    def _runs_from(self, checkpoint: Path) -> list[Run]:
        """Return the runs that start from a checkpoint of the base. Raise ValueError for a run that is invalid."""
        options = self._options
        return [
            self._run(recipe, arm, share, factor, checkpoint)
            for share in sorted(set(options.shares))
            for recipe in RECIPES
            if recipe in options.recipes
            for arm in self._models_of(recipe)
            for factor in dict.fromkeys(options.rate_factors)
        ]

    def _run(self, recipe: str, model: str, share: float, factor: float, checkpoint: Path) -> Run:
        name = recipe if recipe in SOFTMAX_RECIPES else f"{recipe}-{model}"
        fields = self._fields(recipe, model, checkpoint) | {"stages": self._stages(recipe, share, factor)}
        overrides = (*self._options.set, *(f"{field}={json.dumps(value)}" for field, value in fields.items()))
        trial = Trial(f"{name}-share{share:g}-rate{factor:g}", overrides)
        return Run(recipe, model, share, factor, trial, trial.config(self._options.config))

    def _fields(self, recipe: str, model: str, checkpoint: Path) -> dict[str, Any]:
        """Return the fields of a run besides its stages."""
        fields: dict[str, Any] = {"compare": [model], "initial_checkpoint": str(checkpoint)}
        if not self._options.keep_checkpoints:
            fields["checkpoint.stage_ends"] = False
        if recipe == DROPE:
            attention = dataclasses.asdict(self.config.attention[self.base_model])
            default = SoftmaxAttentionConfig()
            own = {"position": "none", "evaluated_scalings": ["none"], "rotary_base": default.rotary_base}
            fields[f"attention.{DROPE}"] = attention | own | {"global_interval": None, "dropped_in": None}
        if recipe not in SOFTMAX_RECIPES:
            fields["initial_attention"] = "softmax"
        if set(RECIPES[recipe]) != {"tokens"}:
            fields["teacher"] = self.base_model
        return fields

    def _stages(self, recipe: str, share: float, factor: float) -> list[dict[str, Any]]:
        """Return the stages of a run: like the base's last one, each with a warm-up and a decay to 0."""
        last, losses = self.config.stages[-1], RECIPES[recipe]
        steps = max(len(losses), round(share * _tokens(self.config) / (last.rows_per_step * last.context_length)))
        first = min(steps - 1, max(1, round(self._options.layers_share * steps)))
        counts = [steps] if len(losses) == 1 else [first, steps - first]
        return [
            dataclasses.asdict(last)
            | {
                "name": "layers" if loss == "layers" else "recalibrated",
                "loss": loss,
                "steps": count,
                "learning_rate": factor * last.learning_rate,
                "warmup_steps": min(count - 1, math.ceil(WARM_UP * count)),
                "warmup_start_rate": 0.0,
                "schedule": "exponential",
                "power_coefficient": None,
            }
            for loss, count in zip(losses, counts, strict=True)
        ]

    def _is_done(self, run: Run) -> bool:
        return sweep.is_done(run.config, self._out / run.trial.name)

    def _nll(self, run: Run) -> float:
        """Return the likelihood at the trained length; infinity if it is not a number."""
        return nll_at(sweep.evaluation(self._out / run.trial.name, run.config, run.model), run.config.stages[-1])

    def _measured(self, run: Run) -> dict[str, Any]:
        folder = self._out / run.trial.name
        scalings = run.config.evaluated_scalings(run.model)
        evaluations = [sweep.evaluation(folder, run.config, run.model, scaling) for scaling in scalings]
        stage: StageConfig = run.config.stages[-1]
        about = {"recipe": run.recipe, "model": run.model, "share": run.share, "factor": run.factor}
        about |= {"rate": stage.learning_rate, "tokens": _tokens(run.config)}
        return about | {"device": evaluations[0]["device"], "evaluations": evaluations}


def _tokens(config: TrainingConfig) -> int:
    """Return the tokens of all stages, also those whose labels do not count."""
    return sum(stage.steps * stage.rows_per_step * stage.context_length for stage in config.stages)
