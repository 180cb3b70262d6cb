"""Compare kinds of attention at an equal budget: of tokens, and of GPU seconds.

Every model of `compare` is an arm. The runs follow from the configuration and the options:

speed       every arm, alone on the device: tokens per second
rate        every arm with every learning rate, with a share of the budget
final       every arm with its best learning rate
seed        the best arm of each family with further seeds
seconds     every arm that is slower than the fastest one, with as many tokens as it trains on in the same time
recall      every arm on associative recall, with every learning rate

A run starts when the runs that it depends on are finished. Runs with the same seed read the same rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_sb.experiments import sweep, tables, verdict_tables
from megatron_sb.experiments.sweep import Trial
from megatron_sb.training.config import (
    AttentionConfig,
    ConfigError,
    GatedDeltaNetConfig,
    MixedAttentionConfig,
    SoftmaxAttentionConfig,
    StageConfig,
    StickBreakingAttentionConfig,
    TrainingConfig,
    check_packages,
    load_config,
)
from megatron_sb.training.directory import read_metrics
from megatron_sb.training.sentence_pairs import load_pairs
from megatron_sb.validation import InputError, MissingFileError

SPEED_STEPS, SPEED_WARM_UP = 20, 8  # of the first stage; the steps of the warm-up are not measured
# Rows of a measured step, as a multiple of those of a step. With its own rows a small model waits for the host: on an
# H100, RoPE and DroPE of verdict.yaml, which are one model in the first stage, differed by 10%.
SPEED_ROWS = 4
RATE_FACTORS = (0.5, 1.0, 2.0, 4.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this experiment."""
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="models of compare (default: all)")
    parser.add_argument(
        "--learning-rates",
        type=float,
        nargs="+",
        metavar="RATE",
        help="learning rates of the first stage; those of the others are scaled alike (default: half, once, twice and "
        "four times that of CONFIG, or of the configuration of --recall)",
    )
    parser.add_argument(
        "--rate-share",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="share of the steps to choose the learning rate with (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="seeds of the best arm of each family (default: %(default)s)",
    )
    parser.add_argument(
        "--test-paths",
        nargs="+",
        metavar="PREFIX",
        help="data sets that the runs with the chosen learning rate are measured with, for data.kind 'indexed' "
        "(default: data.validation_paths of CONFIG)",
    )
    parser.add_argument(
        "--recall", metavar="CONFIG.yaml", help="configuration of associative recall (default: it is not measured)"
    )
    sweep.add_time_limit_arguments(parser)
    parser.add_argument(
        "--keep-checkpoints",
        action="store_true",
        help="keep the checkpoints of finished runs; no later run reads them (default: they are deleted)",
    )
    sweep.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Train what is not trained yet, then write the results, also if a time limit or a signal stops the runs.

    Return the exit status.
    """
    limit = sweep.limit_of(options)
    verdict = Verdict(options, sweep.output_folder(options))
    verdict.check_runs(options.jobs)
    try:
        verdict.train(options.jobs, limit)
    except sweep.SweepStopped:
        verdict.write()
        raise
    verdict.write()
    return 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A trial with its configuration and the arm that it trains.

    Attributes:
        kind: "rate", "final", "seed", "seconds" or "recall".
        arm: a model of compare.
        trial: the run of the sweep.
        config: the trial's configuration.
        value: learning rate of "rate" and "recall", number of the seed of "seed", share of the steps of "seconds".
    """

    kind: str
    arm: str
    trial: Trial
    config: TrainingConfig
    value: float = 0.0


class Verdict:
    """The runs of the experiment, and what they have measured so far.

    Args:
        options: of the command.
        out: folder of the runs.

    Raises:
        ValueError: an option or a configuration is invalid.
    """

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self.config = load_config(options.config, options.set)
        if self.config.data.kind == "recall":
            raise ConfigError("data.kind must be a kind of text for verdict, got 'recall'. Use --recall.")
        self.arms = tuple(dict.fromkeys(options.arms or self.config.compare))
        for arm in self.arms:
            if arm not in self.config.compare:
                raise InputError(f"--arms must name models of compare, which are {self.config.compare}, got {arm!r}.")
        check_packages(self.config, self.arms)
        check_scalings(self.config, self.arms)
        self.rates = self.recall_rates = tuple(dict.fromkeys(options.learning_rates or _rates_around(self.config)))
        if not 0 < options.rate_share <= 1:
            raise InputError(f"--rate-share must be above 0 and at most 1, got {options.rate_share}.")
        if options.seeds < 1 or not all(0 < rate < math.inf for rate in self.rates):
            raise InputError(
                f"--seeds must be at least 1 and --learning-rates above 0, got {options.seeds} and {[*self.rates]}."
            )
        sweep.check_numbers("--learning-rates", self.rates)
        last = self.config.stages[-1]
        if last.context_length not in self.config.evaluation_lengths(last):
            raise ConfigError(
                f"the context_length of stage {last.name} must be evaluation.target_tokens times a power of 2, got "
                f"{last.context_length} and {self.config.evaluation.target_tokens}."
            )
        if options.test_paths is not None and self.config.data.kind != "indexed":
            raise InputError(f"--test-paths needs data.kind = 'indexed', got {self.config.data.kind!r}.")
        self._test = {"data.validation_paths": options.test_paths} if options.test_paths else {}
        self._runs: dict[Trial, Run] = {}
        self._unchanged: set[Trial] = set()
        self._warned: set[str] = set()
        self._keep_checkpoints = options.keep_checkpoints
        self._path, self._set, self._out = options.config, tuple(options.set), out
        self._rate_share, self._num_seeds, self._recall_path = options.rate_share, options.seeds, options.recall
        if self._recall_path is not None:
            recall = load_config(self._recall_path)
            if recall.data.kind != "recall":
                raise InputError(f"--recall must be a configuration with data.kind 'recall', got {self._recall_path}.")
            self.recall_rates = tuple(dict.fromkeys(options.learning_rates or _rates_around(recall)))

    def check_runs(self, jobs: int) -> None:
        """Check what only later runs need. Otherwise the first of them would fail after hours.

        Args:
            jobs: runs at a time. The first runs, which measure the speed, do not use it.

        Raises:
            ValueError: the configuration of a run is invalid, a finished run had another one, a file that only final
                runs read is missing or damaged, or jobs is invalid.
        """
        for arm in self.arms:
            for rate in self.rates:
                self._rate_run(arm, rate)
            self._final_run(arm, min(self.rates))
        for arm in self._recalled_arms():
            for rate in self.recall_rates:
                self._recall_run(arm, rate)
        for prefix in self._test.get("data.validation_paths", ()):
            for path in (Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")):
                if not path.is_file():
                    raise MissingFileError(
                        f"--test-paths must be prefixes of data sets, got {prefix!r}: {path} is missing."
                    )
        load_pairs(self.config.evaluation.sentence_pairs)
        sweep.check_jobs(jobs, [run.config for run in self._runs.values()])
        self.results()  # reads all finished runs

    def train(self, jobs: int, limit: sweep.TimeLimit) -> None:
        """Train until no run is left. Raise `sweep.SweepStopped` if a run fails, or a signal or the limit ends it."""
        keep = self._keep_checkpoints
        speeds = [self._speed_trial(arm) for arm in self.arms]
        sweep.train_all(self._path, speeds, self._out, 1, limit, keep_checkpoints=keep)
        while True:
            self._warn_of_rates_at_the_edge()
            left = [run for run in self.known_runs() if not self._is_done(run)]
            if not left:
                return
            # Runs of another configuration file are a sweep of their own.
            for path in (self._path, self._recall_path):
                trials = [run.trial for run in left if (run.kind == "recall") == (path is self._recall_path)]
                if path is not None and trials:
                    sweep.train_all(path, trials, self._out, jobs, limit, keep_checkpoints=keep)

    def write(self) -> None:
        """Write the results to the output folder, if there are any."""
        results = self.results()
        if results["finals"]:
            verdict_tables.write(self._out, self.config, results)

    def known_runs(self) -> list[Run]:
        """Return the runs whose prerequisites are finished, those that others depend on first."""
        rates = [self._rate_run(arm, rate) for arm in self.arms for rate in self.rates]
        finals = [self._final_run(arm, rate) for arm in self.arms if (rate := self._best_rate(arm)) is not None]
        all_final = len(finals) == len(self.arms) and all(map(self._is_done, finals))
        seeds = [
            self._seed_run(arm, number)
            for arm in (self.best_of_families().values() if all_final else ())
            for number in range(1, self._num_seeds)
        ]
        speeds = self._speeds()
        seconds = [
            self._seconds_run(run, speeds[run.arm] / max(speeds.values()))
            for run in finals
            if speeds and not verdict_tables.is_fast(run.arm, speeds)
        ]
        recall = [self._recall_run(arm, rate) for arm in self._recalled_arms() for rate in self.recall_rates]
        return [*rates, *finals, *seconds, *seeds, *recall]

    def best_of_families(self) -> dict[str, str]:
        """Return the arm of each family with the best likelihood at the trained length. All final runs are finished."""
        best: dict[str, tuple[float, str]] = {}
        for arm in self.arms:
            found = (self._nll(self._final_run(arm, self._best_rate(arm) or 0.0)), arm)
            family = family_of(self.config.attention[arm])
            best[family] = min(best.get(family, found), found)
        return {family: arm for family, (_, arm) in best.items()}

    def results(self) -> dict[str, Any]:
        """Return what the finished runs have measured.

        Returns:
            {"arms", "families": arm -> family, "speeds": arm -> tokens per second, "rates": [{"arm", "rate", "nll"}],
            "finals", "seeds", "seconds": lists of {"arm", "value", "rate", "tokens", "device", "evaluations",
            "attention": lines of metrics.jsonl in which sticks were measured},
            "recall": [{"arm", "rate", "accuracy", "accuracy_standard_error"}], "at_the_edge": see `rates_at_the_edge`,
            "runs": {"finished", "known"}}.
        """
        known = self.known_runs()
        done = [run for run in known if self._is_done(run)]
        by_kind = {kind: [run for run in done if run.kind == kind] for kind in ("rate", "recall")}
        results: dict[str, Any] = {
            "arms": list(self.arms),
            "families": {arm: family_of(self.config.attention[arm]) for arm in self.arms},
            "speeds": self._speeds(),
            "rates": [{"arm": run.arm, "rate": run.value, "nll": self._nll(run)} for run in by_kind["rate"]],
        }
        for kind, name in (("final", "finals"), ("seed", "seeds"), ("seconds", "seconds")):
            results[name] = [self._measured(run) for run in done if run.kind == kind]
        results["recall"] = [
            {"arm": run.arm, "rate": run.value} | self._evaluation(run)["results"][-1] for run in by_kind["recall"]
        ]
        results["at_the_edge"] = self.rates_at_the_edge()
        return results | {"runs": {"finished": len(done), "known": len(known)}}

    def rates_at_the_edge(self) -> list[dict[str, Any]]:
        """Return the arms whose best learning rate is the lowest or the highest of several: others may be better.

        Returns:
            [{"arm", "kind": "rate" or "recall", "rate", "edge": "lowest" or "highest"}], for arms that have finished
            the runs of all rates. Two rates that are equally good are no edge.
        """
        grids = [[self._rate_run(arm, rate) for rate in sorted(self.rates)] for arm in self.arms]
        grids += [[self._recall_run(arm, rate) for rate in sorted(self.recall_rates)] for arm in self._recalled_arms()]
        found = []
        for runs in grids:
            if len(runs) == 1 or not all(map(self._is_done, runs)):
                continue
            losses = [self._nll(run) if run.kind == "rate" else -self._accuracy(run) for run in runs]
            best = [run for run, loss in zip(runs, losses, strict=True) if loss == min(losses)]
            for run, edge in ((runs[0], "lowest"), (runs[-1], "highest")):
                if best == [run]:
                    found.append({"arm": run.arm, "kind": run.kind, "rate": run.value, "edge": edge})
        return found

    def _warn_of_rates_at_the_edge(self) -> None:
        """Name each such arm once, before its best rate is used for longer runs."""
        for sentence in verdict_tables.edge_sentences(self.rates_at_the_edge(), tables.labels_of(self.config)):
            if sentence not in self._warned:
                self._warned.add(sentence)
                print(f"megatron-sb experiment verdict: {sentence}", file=sys.stderr, flush=True)

    def _speed_trial(self, arm: str) -> Trial:
        """Return the run that trains an arm for a few large steps."""
        fields = {f"stages.{index}.steps": 2 for index in range(len(self.config.stages))}
        fields |= {f"stages.{index}.warmup_steps": 1 for index in range(len(self.config.stages))}
        fields |= {"stages.0.steps": SPEED_STEPS, "evaluation.windows": 1, "report.interval": 1}
        fields["stages.0.rows_per_step"] = SPEED_ROWS * self.config.stages[0].rows_per_step
        return self._trial(f"speed-{arm}", (arm,), fields | self._short_evaluation())

    def _rate_run(self, arm: str, rate: float) -> Run:
        fields = self._scaled_steps(self._rate_share) | self._rate_fields(rate) | self._short_evaluation()
        return self._run("rate", arm, f"rate{rate:g}-{arm}", fields, rate)

    def _final_run(self, arm: str, rate: float) -> Run:
        return self._run("final", arm, f"final-{arm}", self._rate_fields(rate) | self._test)

    def _seed_run(self, arm: str, number: int) -> Run:
        fields = self._rate_fields(self._best_rate(arm) or 0.0) | {"seed": self.config.seed + number}
        return self._run("seed", arm, f"seed{number}-{arm}", fields | self._test, number)

    def _seconds_run(self, final: Run, share: float) -> Run:
        rate = self._best_rate(final.arm) or 0.0
        fields = self._scaled_steps(share) | self._rate_fields(rate)
        return self._run("seconds", final.arm, f"seconds-{final.arm}", fields | self._test, share)

    def _recall_run(self, arm: str, rate: float) -> Run:
        assert self._recall_path is not None
        attention = {arm: dataclasses.asdict(self.config.attention[arm])}
        if isinstance(self.config.attention[arm], SoftmaxAttentionConfig):
            attention[arm] |= {"evaluated_scalings": ["none"]}
        fields = {"stages.0.learning_rate": rate} | self._checkpoint_fields()
        overrides = (f"attention={json.dumps(attention)}", f"compare={json.dumps([arm])}", *_overrides(fields))
        trial = Trial(f"recall{rate:g}-{arm}", overrides)
        return self._cached("recall", self._recall_path, arm, trial, rate)

    def _recalled_arms(self) -> list[str]:
        """Return the arms that are measured with associative recall: none without --recall."""
        return [arm for arm in self.arms if self._recall_path is not None and self._can_recall(arm)]

    def _can_recall(self, arm: str) -> bool:
        """Return whether an arm fits the configuration of recall: it drops nothing, and has its layers of all kinds.

        Mixed layers are not measured: the configuration of recall lacks the entries that they name.
        """
        attention = self.config.attention[arm]
        if isinstance(attention, MixedAttentionConfig):
            return False
        if not isinstance(attention, SoftmaxAttentionConfig):
            return True
        layers = load_config(str(self._recall_path)).model.num_layers
        return attention.dropped_in is None and (attention.global_interval or 0) <= layers

    def _run(self, kind: str, arm: str, name: str, fields: dict[str, Any], value: float = 0.0) -> Run:
        return self._cached(kind, self._path, arm, self._trial(name, (arm,), fields), value)

    def _cached(self, kind: str, path: str, arm: str, trial: Trial, value: float) -> Run:
        if trial not in self._runs:
            self._runs[trial] = Run(kind, arm, trial, trial.config(path), value)
        return self._runs[trial]

    def _trial(self, name: str, arms: Iterable[str], fields: dict[str, Any]) -> Trial:
        overrides = (f"compare={json.dumps([*arms])}", *_overrides(fields | self._checkpoint_fields()))
        return Trial(name, (*self._set, *overrides))

    def _scaled_steps(self, share: float) -> dict[str, int]:
        fields: dict[str, int] = {}
        for index, stage in enumerate(self.config.stages):
            steps = max(1, round(share * stage.steps))
            fields[f"stages.{index}.steps"] = steps
            fields[f"stages.{index}.warmup_steps"] = min(steps - 1, math.ceil(share * stage.warmup_steps))
        return fields

    def _rate_fields(self, rate: float) -> dict[str, float]:
        """Return the learning rates of all stages: that of the first is `rate`, the others keep their ratio to it."""
        first = self.config.stages[0].learning_rate
        return {
            f"stages.{index}.learning_rate": rate * (stage.learning_rate / first)
            for index, stage in enumerate(self.config.stages)
        }

    def _checkpoint_fields(self) -> dict[str, Any]:
        """Return the fields of checkpoints. Those at the ends of stages are not needed if they are deleted anyway."""
        return {} if self._keep_checkpoints else {"checkpoint.stage_ends": False}

    def _short_evaluation(self) -> dict[str, Any]:
        """Return the fields of an evaluation of the likelihood only, up to the trained length."""
        fields: dict[str, Any] = {"evaluation.length_factor": 1, "evaluation.positions": False}
        fields["evaluation.sentence_pairs"] = []
        return fields | ({"data.ruler_samples": 0} if hasattr(self.config.data, "ruler_samples") else {})

    def _is_done(self, run: Run) -> bool:
        """Return whether a run is finished. Raise ValueError if it is, but had another configuration."""
        folder = self._out / run.trial.name
        if not sweep.is_done(run.config, folder):
            return False
        if run.trial not in self._unchanged:
            sweep.check_unchanged(run.config, folder)
            self._unchanged.add(run.trial)
        return True

    def _best_rate(self, arm: str) -> float | None:
        """Return the rate with the best likelihood, or None if not all rates are finished."""
        runs = [self._rate_run(arm, rate) for rate in self.rates]
        return min(runs, key=self._nll).value if all(map(self._is_done, runs)) else None

    def _evaluation(self, run: Run, scaling: str = "none") -> dict[str, Any]:
        return sweep.evaluation(self._out / run.trial.name, run.config, run.arm, scaling)

    def _nll(self, run: Run) -> float:
        """Return the likelihood at the trained length; infinity if it is not a number."""
        return nll_at(self._evaluation(run), run.config.stages[-1])

    def _accuracy(self, run: Run) -> float:
        """Return the accuracy of a run of associative recall."""
        return self._evaluation(run)["results"][-1]["accuracy"]

    def _measured(self, run: Run) -> dict[str, Any]:
        evaluations = [self._evaluation(run, scaling) for scaling in run.config.evaluated_scalings(run.arm)]
        tokens = sum(stage.steps * stage.rows_per_step * stage.context_length for stage in run.config.stages)
        rate = run.config.stages[0].learning_rate
        about = {"arm": run.arm, "value": run.value, "rate": rate, "tokens": tokens, "attention": self._sticks(run)}
        return about | {"device": evaluations[0]["device"], "evaluations": evaluations}

    def _sticks(self, run: Run) -> list[dict[str, Any]]:
        """Return the reported steps of a run that measured the sticks of its layers, each with its tokens and loss."""
        names = ("stage", "step", "tokens", "loss", "remainder_by_layer", "skipped_tiles_by_layer")
        lines = read_metrics(self._out / run.trial.name)
        return [{name: line[name] for name in names} for line in lines if "skipped_tiles_by_layer" in line]

    def _speeds(self) -> dict[str, float]:
        """Return the tokens per second of every arm, alone on its device; {} until all are measured."""
        speeds, first = {}, self.config.stages[0].name
        for arm in self.arms:
            trial = self._speed_trial(arm)
            folder = self._out / trial.name
            if not sweep.is_done(trial.config(self._path), folder):
                return {}
            measured = [line for line in read_metrics(folder) if line["stage"] == first]
            speeds[arm] = statistics.median(
                line["tokens_per_second"] for line in measured if line["step"] > SPEED_WARM_UP
            )
        return speeds


def _overrides(fields: dict[str, Any]) -> list[str]:
    return [f"{field}={value!r}" for field, value in fields.items()]


def _rates_around(config: TrainingConfig) -> list[float]:
    """Return the learning rates to try by default."""
    return [factor * config.stages[0].learning_rate for factor in RATE_FACTORS]


def family_of(attention: AttentionConfig) -> str:
    """Return the family of an arm: variants of one idea, of which the best one is trained with several seeds.

    Example:
        >>> family_of(SoftmaxAttentionConfig(position="alibi"))
        'alibi'
    """
    if isinstance(attention, StickBreakingAttentionConfig):
        return "stick-breaking"
    if isinstance(attention, (MixedAttentionConfig, GatedDeltaNetConfig)):
        return attention.kind
    if attention.global_interval is not None:
        return "windows"
    return "forget gates" if attention.forget_gate else attention.position


def check_scalings(config: TrainingConfig, models: Iterable[str]) -> None:
    """Raise ConfigError if one of the models is not evaluated without scaled positions, by which runs are compared."""
    for model in models:
        if "none" not in (scalings := config.evaluated_scalings(model)):
            raise ConfigError(f"evaluated_scalings of {model} must have the item none, got {[*scalings]}.")


def nll_at(evaluation: dict[str, Any], stage: StageConfig) -> float:
    """Return the likelihood of an evaluation at the stage's context length; infinity if it is not a number."""
    nll = verdict_tables.entry_at(evaluation["results"], stage.context_length)["nll"]
    return nll if math.isfinite(nll) else math.inf
