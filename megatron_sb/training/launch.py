"""The start of a job.

`main` is the entry point of the command and of every rank. Under torchrun (RANK and WORLD_SIZE are set) the process is
a rank. Otherwise it starts `parallel.ranks` processes on this machine, which call `main` again, and supervises them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from megatron_sb.processes import garbage_collection_paused, module_command, outliving_readers
from megatron_sb.training import config as configuration
from megatron_sb.training.command import Command
from megatron_sb.training.config import TrainingConfig
from megatron_sb.training.directory import config_of_run
from megatron_sb.training.profiler import ProfilerWindow
from megatron_sb.training.supervisor import EXIT_REFUSED, say, start_ranks
from megatron_sb.validation import InputError, check_output_folder, is_of_user, message_of


def main(
    config_path: str,
    overrides: Sequence[str] = (),
    *,
    out: str | None = None,
    resume: bool = False,
    profile: str | None = None,
) -> int:
    """Train what a configuration describes.

    Under torchrun this function does not return: each rank ends its process.

    Args:
        config_path: a YAML file; configs/README.md explains its fields. With `resume` it may also be the folder of a
            run: its config.yaml is used, and `out` is this folder.
        overrides: `dotted.field=value` with the value in YAML.
        out: the run's directory. Default: runs/NAME-TIME, or the newest runs/NAME-TIME with `resume`.
        resume: continue the run in `out`.
        profile: "FIRST:LAST", the steps of each stage that rank 0 profiles into DIR/profile/MODEL.STAGE.json, with DIR
            the run's directory. Default: none.

    Returns:
        0: the job is done. 1: a rank failed, or training diverged. 2: the configuration or the directory was rejected.
        128 + signal: a signal stopped the job. It has saved, unless a second signal, the timeout or a failed rank ended
        it first; see docs/design/supervision.md.

    Example:
        >>> from megatron_sb.training.launch import main
        >>> main("configs/tiny_context_extension.yaml", ["stages.0.steps=50"], out="runs/short")  # doctest: +SKIP
        0
    """
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if is_rank:
        # Until `loop.StopRequest` handles it, there is nothing to save. Python would print a traceback for each rank.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if is_rank:
            _check_environment()
        config_path, out = _of_run(config_path, out, resume)
        config = configuration.load_config(config_path, overrides)
        _check_modules(config)
        if out is not None:
            _check_out(out)
        longest = max(stage.steps for stage in config.stages)
        window = (0, 0) if profile is None else ProfilerWindow.parse(profile, longest)
    except (InputError, OSError) as error:
        if not is_of_user(error):
            raise
        say(message_of(error))
        return EXIT_REFUSED
    if is_rank:
        with garbage_collection_paused():
            from megatron_sb.training.rank import run_rank

        with outliving_readers():
            run_rank(config, Command(config_path, tuple(overrides), out, resume, window))
    arguments = [config_path, *overrides, *(["--out", out] if out else []), *(["--resume"] if resume else [])]
    arguments += ["--profile", profile] if profile else []
    with outliving_readers():
        return start_ranks(config, [*module_command("megatron_sb.training"), *arguments])


def _check_environment() -> None:
    """Raise ValueError unless a rank has the other variables that torchrun sets."""
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(
            "the environment must have all variables of torchrun or none, got RANK and WORLD_SIZE without "
            f"{', '.join(missing)}. Start the ranks with torchrun, or unset RANK and WORLD_SIZE for a job on this "
            "machine."
        )


def _check_modules(config: TrainingConfig) -> None:
    """Raise ValueError if a module of the extra `train` is not installed. Ranks would import it after some steps."""
    for name in ("tqdm", "megatron", "matplotlib", *(["tensorboard"] if config.report.tensorboard else [])):
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"the job needs the module {name}, which is not installed: pip install 'megatron-sb[train]'"
            )


def _check_out(out: str) -> None:
    """Raise ValueError unless `out` can be the folder of a run."""
    check_output_folder("--out", out)
    try:
        out.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"--out must be a folder whose name is text in UTF-8, got {out!r}: TensorBoard and torch's store reject "
            "other names."
        ) from None


def _of_run(config_path: str, out: str | None, resume: bool) -> tuple[str, str | None]:
    """Return the configuration and the folder of a run that `config_path` names. For a file, return both arguments."""
    folder = Path(config_path)
    if resume and not folder.exists():
        raise InputError(f"--resume needs the folder of a run or a configuration, got {folder}, which does not exist.")
    if not folder.is_dir():
        return config_path, out
    if not resume:
        raise InputError(
            f"the configuration must be a YAML file, got the folder {folder}. To continue a run, give its folder and "
            "--resume."
        )
    path = config_of_run(folder)
    if out is not None and Path(out).resolve() != folder.resolve():
        raise InputError(f"--out must be absent or {folder}, the run to resume, got {out}")
    return str(path), str(folder)
