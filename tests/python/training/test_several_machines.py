"""The examples of jobs over several machines: torchrun on two machines, both of which are this one, a Slurm made of two
small scripts, and the pods of Kubernetes as processes.

Pods that get a signal run as their command says. Elsewhere a small script in place of torchrun or Python records its
arguments and environment, and forks run with these: a rank imports Megatron-Core for seconds. test_job_options.py runs
the torchrun of one machine.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.fork_server import python_processes
from support.jobs import FORKED_TRAIN, TIMEOUT_SECONDS
from support.launch import SEVERAL_MACHINES, unused_port

ROOT = Path(__file__).parents[3]
SMALL = ["parallel.ranks=2", "parallel.device=cpu", "parallel.threads_per_rank=1", "compare=[stick_breaking]"]
SMALL += ["model={num_layers: 1, hidden_size: 32, num_heads: 2, num_kv_heads: 2, ffn_hidden_size: 64}"]
SMALL += [
    "stages.0.context_length=64",
    "stages.1.context_length=128",
    "evaluation.windows=2",
    "evaluation.target_tokens=32",
]
SMALL += ["stages.0.steps=31", "stages.1.steps=11", "evaluation.length_factor=1"]
# What Slurm does for a job of one machine and two tasks.
SLURM = {
    "scontrol": "#!/usr/bin/env bash\necho 127.0.0.1\n",
    "srun": """#!/usr/bin/env bash
    shift
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
    SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
    wait $first && wait $second
    """,
}

TORCHRUN = [FORKED_TRAIN[0], "torch.distributed.run"]
RECORD = """#!/usr/bin/env bash
printf '%s\\0' "$@" > "$RECORDS/$$.arguments"
env -0 > "$RECORDS/$$.environment"
"""


@pytest.fixture
def recorded(tmp_path):
    """Return a function that runs a command, and returns the arguments and environments of its torchrun or Python."""
    programs, records = tmp_path / "programs", tmp_path / "records"
    programs.mkdir()
    for name, script in {"torchrun": RECORD, "python3": RECORD, **SLURM}.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)

    def run(command, *arguments, **environment):
        records.mkdir()
        variables = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORDS": str(records), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*map(str, [*command, ROOT / "configs" / "tiny_context_extension.yaml", *SMALL, *arguments])],
            cwd=ROOT,
            env={**os.environ, **variables, **environment},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = []
        for path in sorted(records.glob("*.arguments")):
            variables = path.with_suffix(".environment").read_text().split("\0")[:-1]
            found.append((path.read_text().split("\0")[:-1], dict(line.split("=", 1) for line in variables)))
        shutil.rmtree(records)
        assert all(environment["PYTHONSAFEPATH"] == "1" for _, environment in found)
        return found

    return run


def train(program, calls, out):
    """Run a program in forks with each of the recorded arguments and environments. Return the steps of the job."""
    jobs = [{"arguments": [*program, *arguments], "environment": own, "folder": ROOT} for arguments, own in calls]
    with python_processes(jobs) as processes:
        for process in processes:
            assert process.wait(TIMEOUT_SECONDS) == 0, "".join(p.stdout + p.stderr for p in processes)
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_torchrun_on_two_machines(recorded, tmp_path):
    """Each machine starts a rank, and the ranks find each other."""
    environment = {"NODES": "2", "RANKS_PER_NODE": "1", "SECONDS_AT_MOST": "20"}
    calls = recorded([SEVERAL_MACHINES], "--out", tmp_path / "out", **environment)
    assert len(calls) == 2
    assert train(TORCHRUN, calls, tmp_path / "out") == [*range(1, 32), *range(1, 12)]


def test_slurm(recorded, tmp_path):
    environment = {"SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    environment |= {"MASTER_PORT": str(unused_port()), "SLURM_CPUS_PER_TASK": "3"}
    calls = recorded(["bash", ROOT / "examples" / "train_slurm.sbatch"], "--out", tmp_path / "out", **environment)
    assert [own["SRUN_CPUS_PER_TASK"] for _, own in calls] == ["3", "3"], "or srun gives each rank one core"
    assert train([], calls, tmp_path / "out") == [*range(1, 32), *range(1, 12)]


@contextlib.contextmanager
def two_machines(*arguments, folders=(ROOT, ROOT)):
    """Start a rank on each of two machines with its own arguments and working directory, as torchrun does."""
    rendezvous = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    rendezvous |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    start = ["-m", "megatron_sb.training", ROOT / "configs" / "tiny_context_extension.yaml", *SMALL]
    jobs = [
        {"arguments": [*start, *own], "environment": rendezvous | {"RANK": rank}, "folder": folder}
        for rank, own, folder in zip("01", arguments, folders, strict=True)
    ]
    with python_processes(jobs) as processes:
        yield processes


@pytest.mark.parametrize(
    ("of_first", "of_second", "message"),
    [
        (
            "stages.0.learning_rate=0.25",
            "stages.0.learning_rate=0.125",
            "must have the same configuration, got stages.0.learning_rate = 0.25 on rank 0 and 0.125 on rank 1.",
        ),
        # The configuration is the cause of the second rank's error.
        (
            "evaluation.longest=128",
            "evaluation.longest=9999999",
            "must have the same configuration, got evaluation.longest = 128 on rank 0 and 9999999 on rank 1.",
        ),
        (
            "data.paths=[{folder}/first]",
            "data.paths=[{folder}/second]",
            "must read the same data, got checksum = ",
        ),
        (
            "evaluation.sentence_pairs=[{folder}/first.jsonl]",
            "evaluation.sentence_pairs=[{folder}/second.jsonl]",
            "must read the same data, got evaluation.sentence_pairs = ",
        ),
    ],
    ids=["learning rate", "error", "data", "sentence pairs"],
)
def test_machines_that_differ(of_first, of_second, message, tmp_path):
    """Each machine reads its own files. The ranks would train with different rates, or on different tokens."""
    for name, last in (("first", "a"), ("second", "b")):
        (tmp_path / name).mkdir()
        for number in range(9):
            (tmp_path / name / f"{number}.txt").write_text(1000 * str(number) + last)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"sentence_good": "It is.", "sentence_bad": f"It {last}."}))
    common = ["--out", tmp_path / "out", "data.validation_fraction=0.4"]
    with two_machines(*([*common, own.format(folder=tmp_path)] for own in (of_first, of_second))) as processes:
        assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [2, 2]
        assert message in processes[0].stderr
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_machines_that_start_from_different_weights(tmp_path):
    """Each machine has its own copy of initial_checkpoint. The weights of the ranks would differ for the whole run."""
    short = ["stages.0.steps=2", "stages.1.steps=2", "stages.0.warmup_steps=1", "stages.1.warmup_steps=1"]
    with two_machines(*[["--out", tmp_path / "base", *short]] * 2) as processes:
        assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [0, 0], processes[0].stderr
    saved = tmp_path / "base" / "stick_breaking" / "checkpoints"
    for first, second, status in (("short", "short", 0), ("short", "extended", 2)):
        starts = [f"initial_checkpoint={saved / stage}-000002" for stage in (first, second)]
        out = tmp_path / second
        with two_machines(*(["--out", out, *short, start] for start in starts)) as processes:
            assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [status] * 2, processes[0].stderr
            different = "must read the same data, got initial_checkpoint = " in processes[0].stderr
        assert different == (status == 2) and (out / "config.yaml").exists() == (status == 0)
    shutil.rmtree(saved)  # a run that has checkpoints of its own does not read it again
    with two_machines(*(["--out", tmp_path / "short", "--resume", *short, starts[0]] for _ in range(2))) as processes:
        assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [0, 0], processes[0].stderr


def test_machines_with_other_working_directories(tmp_path):
    """Both ranks write to the directory of rank 0, so that the checkpoints are whole."""
    short = ["stages.0.steps=2", "stages.1.steps=2", "stages.0.warmup_steps=1", "stages.1.warmup_steps=1"]
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with two_machines(*[["--out", "out", *short]] * 2, folders=folders) as processes:
        assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [0, 0], processes[0].stderr
    assert not list(folders[1].iterdir())
    checkpoints = [*(folders[0] / "out" / "stick_breaking" / "checkpoints").glob("*-*")]
    assert checkpoints
    for checkpoint in checkpoints:
        assert {path.name for path in checkpoint.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


def kubernetes():
    """Return the Service, the Job and the container of the example."""
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/train.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return service, job, container


def test_the_parts_of_the_kubernetes_example_fit():
    service, job, container = kubernetes()
    spec, template = job["spec"], job["spec"]["template"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert int(environment["NODES"]) == spec["completions"] == spec["parallelism"]
    assert int(environment["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    # Kubernetes gives pod 0 of an indexed Job this name, in the subdomain of a headless Service that selects the pod.
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == template["spec"]["subdomain"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert int(environment["MASTER_PORT"]) in [port["port"] for port in service["spec"]["ports"]]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def pod_command_and_environments():
    """Return the command of a pod, and the variables of each pod, with one rank on this machine."""
    container = kubernetes()[2]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    environment |= {"RANKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
    numbers = range(int(environment["NODES"]))
    return container["command"], [environment | {"JOB_COMPLETION_INDEX": str(number)} for number in numbers]


@contextlib.contextmanager
def started_pods(*arguments):
    """Start the pods of the Kubernetes example as processes, and kill them at the end of the `with` block."""
    command, environments = pod_command_and_environments()
    command = [*command, ROOT / "configs" / "tiny_context_extension.yaml", *SMALL, *arguments]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    processes = [
        subprocess.Popen(
            [*map(str, command)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_kubernetes(recorded, tmp_path):
    """Each pod starts a rank. SIGTERM, which Kubernetes sends when the Job is deleted, lets them save and stop."""
    out, long = tmp_path / "out", "stages.0.steps=60"  # SIGTERM must come before the end
    metrics = out / "metrics.jsonl"
    with started_pods(long, "--out", out) as pods:
        while not (metrics.exists() and metrics.read_text()):
            assert all(pod.poll() is None for pod in pods), [pod.communicate(timeout=170)[0] for pod in pods]
            time.sleep(0.05)
        for pod in pods:
            pod.send_signal(signal.SIGTERM)
        outputs = [pod.communicate(timeout=170)[0] for pod in pods]
        assert all(pod.returncode for pod in pods) and "stopped by SIGTERM at step" in outputs[0], outputs
    command, environments = pod_command_and_environments()
    calls = [call for own in environments for call in recorded(command, long, "--out", out, "--resume", **own)]
    assert len(calls) == 2
    assert train(TORCHRUN, calls, out) == [*range(1, 61), *range(1, 12)]
