"""Build, run the `gpu` tests, compute-sanitizer and benchmarks on a GPU machine, and write a dated record.

The stages run one after another, each with a time limit, even after a stage fails. A short table follows. Logs and the
record (YYYY-MM-DD-GPU-suite.md, or -suite-2.md for a second run on this day) are written to --out. With --library-from
nothing is built: the suite uses the libraries of a build made elsewhere, with the Python files of this checkout. That
build needs the same torch.
"""

import argparse
import atexit
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from arguments import input_folder, output_folder, part, whole_number
from report import described
from timing import machine

ROOT = Path(__file__).parents[1]
REPORT_S = 15  # time for pytest to report after SIGINT
# "filled" runs the cases without a tool, in memory filled with NaN. It replaces initcheck, which takes memory that TMA
# has written for uninitialised, as the Hopper backward does at head_dim 64.
TOOLS = ("memcheck", "racecheck", "synccheck", "filled", "initcheck")
DEFAULT_TOOLS = TOOLS[:-1]
STAGES = ("build", "tests", "portable", "sanitize", "bench")
TRAINING_STAGES = ("training", "layouts", "experiments")  # need Megatron-Core; the first uses one GPU, the others all
HEADS_OF_128 = [
    f"model.{field}" for field in ("num_heads=12", "num_kv_heads=12", "head_dim=128", "num_parameters=null")
]
# Full forms of docs/experiments.md. A second run of this script resumes them in --out.
EXPERIMENTS = {
    "attention-picture": "configs/mqrar.yaml --set compare=[stick_breaking] --set data.num_pairs=5 "
    "--set data.fewest_pairs=null --set data.num_keys=64 --set data.num_values=64 --set stages.0.context_length=64 "
    "--set stages.0.rows_per_step=256 --set stages.0.steps=4000",
    "mqrar": "configs/mqrar.yaml --pairs 32 64 96 128 160 192 --learning-rates 3e-4 5e-4 1e-3 3e-3 --jobs 12",
    "extrapolation": "configs/extrapolation.yaml --jobs 8",
    "skipping": "{out}/extrapolation/stick_breaking/config.yaml",
    "needles": "configs/needles.yaml --lengths 2048 4096 8192 16384 32768 --samples 50",
}
TRAINED = {"1b": ("dense_1b", []), "1b-128": ("dense_1b", HEADS_OF_128), "350m": ("dense_350m", [])}


@dataclass
class Step:
    """One command of a stage."""

    name: str
    command: list[str]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)
    verdict: str = "-"
    seconds: float = 0.0
    summary: str = ""


def steps_of(stage: str, options: argparse.Namespace) -> list[Step]:
    """Return the commands of a stage. They run in the repository's root."""
    python, out = sys.executable, options.out
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", "--maxfail=30"]
    # worksteal: a worker without tests takes some of a worker that still has the slow tests of Megatron
    workers = ["-n", str(options.workers), "--dist", "worksteal"] if options.workers > 1 else []
    if stage == "build":
        install = [python, "-m", "pip", "install", "-q", "--no-build-isolation", "-e", "."]
        return [Step("build", install, 900)]
    if stage == "tests":
        return [Step("tests", [*tests, *workers, "-m", "gpu or multigpu", *options.select], 420)]
    if stage == "portable":  # tests that use other kernels by default, with a small workspace
        which = ["tests/python/gpu/test_fuzz.py", "tests/python/gpu/test_accuracy_bars.py", "-k", "not 65536"]
        variables = {"MEGATRON_SB_KERNELS": "portable", "MEGATRON_SB_WORKSPACE_MIB": "1"}
        return [Step("portable", [*tests, *workers, *which], 240, variables)]
    if stage == "sanitize":
        cases = str(ROOT / "tests/python/gpu/sanitizer_cases.py")
        sanitizer = [
            shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer",
            "--error-exitcode",
            "9",
            "--print-limit",
            "20",
        ]
        filled = [python, cases, options.part, "--fill"]
        commands = {tool: [*sanitizer, "--tool", tool, python, cases, options.part] for tool in TOOLS}
        return [Step(tool, commands[tool] if tool != "filled" else filled, 180) for tool in options.tools]
    if stage == "training":
        return [
            Step(
                f"training-{name}",
                [
                    *(
                        python,
                        "benchmarks/training.py",
                        f"configs/{config}.yaml",
                        "--json",
                        f"{out}/training-{name}.json",
                    ),
                    *(word for field in changes for word in ("--set", field)),
                    *options.training_arguments,
                ],
                500,
            )
            for name, (config, changes) in TRAINED.items()
            if name in options.models
        ]
    if stage == "layouts":
        record = [python, "benchmarks/training_layouts.py", "record"]
        return [
            Step(f"layouts-{model}", [*record, f"{out}/layouts-{model}.json", "--model", model, *lengths], 500)
            for model, lengths in (("dense", ["--lengths", "16384", "65536"]), ("moe", []))
        ]
    if stage == "experiments":
        command = [python, "-m", "megatron_sb.cli", "experiment"]
        return [
            Step(name, [*command, name, *EXPERIMENTS[name].format(out=out).split(), "--out", f"{out}/{name}"], 3000)
            for name in options.experiments
        ]
    bench = [python, "benchmarks/attention.py", "--json", f"{out}/bench.json", "--markdown", f"{out}/bench.md"]
    return [Step("bench", [*bench, *options.bench_arguments], 600)]


def run(step: Step, options: argparse.Namespace) -> None:
    """Run a step within its time limit and write its output to a log.

    The step has its own process group. At the end the whole group is killed, so that no process survives.
    """
    if shutil.which(step.command[0]) is None:
        step.verdict, step.summary = "FAILED", f"{step.command[0]} was not found"
        return
    environment = {**os.environ, **step.environment, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([*options.python_path, *filter(None, [os.environ.get("PYTHONPATH")])])
    if options.library_from:  # Python must not find the package of this checkout first: it has no library
        environment["PYTHONSAFEPATH"] = "1"
    log = options.out / f"{step.name}.log"
    begin = time.monotonic()
    with log.open("w") as file:
        print("$", " ".join(step.command), file=file, flush=True)
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        limit_s = min(step.limit_s, options.limit_s or step.limit_s)
        try:
            status = process.wait(timeout=limit_s)
            step.verdict = "ok" if status == 0 else f"FAILED ({status})"
        except subprocess.TimeoutExpired:
            step.verdict = f"TIME LIMIT ({limit_s} s)"
            process.send_signal(signal.SIGINT)  # pytest then reports the tests so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=REPORT_S)
        finally:  # also after Ctrl-C, which reaches this process alone
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    step.seconds = time.monotonic() - begin
    step.summary = _summary(log.read_text(errors="replace"))
    if step.verdict == "ok" and "pytest" in step.command and " passed" not in step.summary:
        step.verdict = "NOTHING RAN"


def _summary(log: str) -> str:
    """Return the last summary line of a sanitizer, of pytest or of a benchmark, or else the last line."""
    lines = [line.strip(" =") for line in log.splitlines() if line.strip(" =")]
    summaries = [
        line for line in lines if re.search(r"(ERROR|RACECHECK) SUMMARY|\d+ (passed|failed|wrong)|took [\d.]+ s", line)
    ]
    return (summaries or lines or ["no output"])[-1][:150]


def _temporary_folder(prefix: str) -> Path:
    """Make a folder that this process removes when it ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def library_folder(source: Path) -> Path:
    """Make a folder with the package megatron_sb: Python files of this checkout, libraries from `source`."""
    version = f"torch{'.'.join(torch.__version__.split('.')[:2])}"
    libraries = [*source.rglob(f"{version}/libmegatron_sb_ops.so")]
    if not libraries:
        raise SystemExit(f"A build must be a folder with a {version}/libmegatron_sb_ops.so, got {source}.")
    package = _temporary_folder("megatron_sb_suite_") / "megatron_sb"
    shutil.copytree(ROOT / "megatron_sb", package, ignore=shutil.ignore_patterns("lib", "_C.*", "__pycache__"))
    shutil.copytree(libraries[0].parents[1], package / "lib")
    modules = [*source.rglob("_C.abi3.so")]
    if modules:
        shutil.copy(modules[0], package)
    else:  # a build without Python; only `megatron-sb info` reads the module
        about = {
            "version": "unknown",
            "cuda": str(torch.version.cuda),
            "cuda_architectures": [80, 90],  # the default of a build
            "fast_compile": False,
            "compiler": "unknown",
        }
        (package / "_C.py").write_text(f"def build_info():\n    return {about!r}\n")
    return package.parent


def python_path(options: argparse.Namespace) -> list[str]:
    """Return the PYTHONPATH of the steps: --library-from, --wheels, and the folders of scripts that import others."""
    folders = [library_folder(options.library_from)] if options.library_from else []
    if options.wheels:
        site = _temporary_folder("megatron_sb_wheels_")
        wheels = sorted(options.wheels.glob("*.whl"))
        if not wheels:
            raise SystemExit(f"--wheels must be a folder with wheels, got {options.wheels} without one.")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site]
        subprocess.run([*map(str, install), *map(str, wheels)], check=True)
        folders.append(site)
    return [*map(str, folders), *(str(ROOT / name) for name in ("benchmarks", "tests/python", "tests/python/workers"))]


def record(steps: list[Step], options: argparse.Namespace) -> str:
    """Return the dated record in Markdown: the machine, the steps, and the benchmark's tables."""
    here = machine()
    lines = [f"# GPU suite, {here['date']}", "", f"{described(here)}, Python {sys.version.split()[0]}.", ""]
    lines += ["| step | verdict | seconds | |", "| --- | --- | ---: | --- |"]
    lines += [f"| {s.name} | {s.verdict} | {s.seconds:.0f} | {s.summary.replace('|', '/')} |" for s in steps]
    tables = options.out / "bench.md"
    if tables.exists() and any(s.name == "bench" for s in steps):
        lines += ["", tables.read_text().replace("# ", "## ", 1)]
    return "\n".join(lines) + "\n"


def new_record(folder: Path) -> Path:
    """Return the path of a record that does not exist: YYYY-MM-DD-GPU-suite.md, or else -suite-2.md and so on."""
    gpu = torch.cuda.get_device_name().split()[-1].lower() if torch.cuda.is_available() else "no-gpu"
    name = f"{time.strftime('%Y-%m-%d')}-{gpu}-suite"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in (folder / f"{name}.md" for name in names) if not path.exists())


def parse(args: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=output_folder, required=True, help="folder for the logs and the record")
    stages = [*STAGES, *TRAINING_STAGES]
    add("--stages", nargs="+", choices=stages, default=list(STAGES), help="what to run (default: %(default)s)")
    add(
        "--library-from",
        type=input_folder,
        help="folder of a build made elsewhere; skips stage build (default: none)",
    )
    add("--wheels", type=input_folder, help="folder of wheels to use, such as megatron-core's (default: none)")
    add("--workers", type=whole_number(1), default=1, help="pytest-xdist workers on the GPU (default: %(default)s)")
    add("--limit-s", type=whole_number(1), help="upper limit of the steps' time limits, in seconds (default: none)")
    add("--tools", nargs="+", choices=TOOLS, default=list(DEFAULT_TOOLS), help="sanitizers (default: %(default)s)")
    add("--part", type=part, default="1/1", help="part of the sanitizers' cases, such as 2/4 (default: %(default)s)")
    add("--select", nargs=argparse.REMAINDER, default=[], help="more arguments for pytest; must be the last option")
    add("--models", nargs="+", choices=TRAINED, default=list(TRAINED), help="models of stage training (default: all)")
    add(
        "--experiments",
        nargs="+",
        choices=EXPERIMENTS,
        default=list(EXPERIMENTS),
        help="experiments of stage experiments (default: all)",
    )
    for name in ("training", "attention"):
        option = "--training-arguments" if name == "training" else "--bench-arguments"
        add(option, type=str.split, default=[], help=f"more arguments for benchmarks/{name}.py, in quotes")
    options = parser.parse_args(args)
    options.out = options.out.resolve()
    return options


def main(args: list[str] | None = None) -> int:
    """Run the stages and return 0 if all steps passed."""
    options = parse(args)
    options.python_path = python_path(options)
    stages = [stage for stage in options.stages if stage != "build" or not options.library_from]
    steps = [step for stage in stages for step in steps_of(stage, options)]
    if any(step.name == "bench" for step in steps):
        (options.out / "bench.md").unlink(missing_ok=True)  # the tables of an earlier run
    for step in steps:
        run(step, options)
        print(f"{step.name:10s} {step.verdict:20s} {step.seconds:5.0f} s  {step.summary}", flush=True)
    new_record(options.out).write_text(record(steps, options))
    failed = [step for step in steps if step.verdict != "ok"]
    for step in failed:
        print(f"--- last lines of {step.name}.log")
        log = options.out / f"{step.name}.log"
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]) if log.exists() else step.summary)
    print("\nstep       verdict                  s")
    for step in steps:
        print(f"{step.name:10s} {step.verdict:20s} {step.seconds:5.0f}  {step.summary[:80]}")
    return int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the step, too
    sys.exit(main())
