"""The examples of jobs over several machines: torchrun on two machines, both of which are this one, a Slurm made of two
small scripts, and the pods of Kubernetes as processes. test_job_options.py runs torchrun on one machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
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
    "scontrol": "echo 127.0.0.1",
    "srun": """shift
    SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
    SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
    wait $first && wait $second""",
}


def run(command, out, **environment):
    """Train the small model with one of the examples and return the steps it reported."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    arguments = [ROOT / "configs" / "tiny_context_extension.yaml", *SMALL, "--out", out]
    done = subprocess.run(
        [*map(str, [*command, *arguments])],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_torchrun_on_two_machines(tmp_path):
    """Each machine starts a rank, and the ranks find each other."""
    steps = run([SEVERAL_MACHINES], tmp_path / "out", NODES="2", RANKS_PER_NODE="1", SECONDS_AT_MOST="170")
    assert steps == [*range(1, 32), *range(1, 12)]


def test_slurm(tmp_path):
    for name, script in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"SLURM_JOB_NODELIST": "here", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", path)
        environment["MASTER_PORT"] = str(unused_port())
        steps = run(["bash", ROOT / "examples" / "train_slurm.sbatch"], tmp_path / "out", **environment)
    assert steps == [*range(1, 32), *range(1, 12)]


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


class Pods:
    """The pods of the Kubernetes example as processes of this machine, with one rank each."""

    def __init__(self, *arguments):
        container = kubernetes()[2]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        environment |= {"RANKS_PER_NODE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
        environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = [*container["command"], ROOT / "configs" / "tiny_context_extension.yaml", *SMALL, *arguments]
        self.processes = [
            subprocess.Popen(
                [*map(str, command)],
                cwd=ROOT,
                env={**os.environ, **environment, "JOB_COMPLETION_INDEX": str(index)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(int(environment["NODES"]))
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(self):
        """Return the exit statuses and the outputs."""
        outputs = [process.communicate(timeout=170)[0] for process in self.processes]
        return [process.returncode for process in self.processes], outputs


def test_kubernetes(tmp_path):
    """Each pod starts a rank. SIGTERM, which Kubernetes sends when the Job is deleted, lets them save and stop."""
    out, long = tmp_path / "out", "stages.0.steps=60"  # SIGTERM must come before the end
    metrics = out / "metrics.jsonl"
    with Pods(long, "--out", out) as pods:
        while not (metrics.exists() and metrics.read_text()):
            assert all(process.poll() is None for process in pods.processes), pods.wait()
            time.sleep(0.05)
        for process in pods.processes:
            process.send_signal(signal.SIGTERM)
        statuses, outputs = pods.wait()
    assert all(statuses) and "stopped by SIGTERM at step" in outputs[0], outputs
    with Pods(long, "--out", out, "--resume") as pods:
        statuses, outputs = pods.wait()
    assert statuses == [0, 0], outputs
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [*range(1, 61), *range(1, 12)]
