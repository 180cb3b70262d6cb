"""examples/docker/Dockerfile uses what is in the repository. No test builds the image."""

import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.build_backend import CPU, call_hook
from support.cmake import needs_cmake
from support.project import pyproject

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "examples/docker/Dockerfile"
STAGES = 2


def instructions():
    """Return the instructions as (name, rest of the line), with continued lines joined and without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def all_of(name):
    return [rest for found, rest in instructions() if found == name]


def commands():
    """Return the words of each command of RUN."""
    runs = [re.sub(r"^(--\S+\s+)*", "", run) for run in all_of("RUN")]
    return [shlex.split(command) for run in runs for command in run.split("&&")]


def pip_commands():
    return [command[1:] for command in commands() if command[0] == "pip"]


def copied_paths():
    return [path for rest in all_of("COPY") for path in rest.split()[:-1]]


def test_instructions_are_known():
    names = {name for name, _ in instructions()}
    assert names == {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}


def test_copied_paths_exist_and_are_in_the_context():
    """The .dockerignore ignores everything, and then makes exceptions."""
    ignored, *rules = [line for line in Path(f"{DOCKERFILE}.dockerignore").read_text().splitlines() if line[0] != "#"]
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert ignored == "*" and set(copied_paths()) == kept
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = listed.stdout.splitlines() if listed.returncode == 0 else []
    for path in kept:
        assert (ROOT / path).exists(), path
    again = [rule for rule in rules if not rule.startswith("!")]
    assert not [name for name in tracked for rule in again if fnmatch.fnmatch(name, rule.replace("**", "*"))]


@needs_cmake
def test_the_copied_sources_can_be_built(tmp_path):
    """The checks of the build pass with nothing but the files that the Dockerfile copies."""
    pytest.importorskip("scikit_build_core")
    for name in copied_paths():
        target = tmp_path / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    (tmp_path / "out").mkdir()
    done = call_hook("prepare_metadata_for_build_wheel", tmp_path / "out", CPU, tmp_path / "source")
    assert done.returncode == 0, done.stderr


def test_shell_commands_have_valid_syntax():
    for run in all_of("RUN"):
        script = re.sub(r"^(--\S+\s+)*", "", run)
        done = subprocess.run(["sh", "-n", "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_stages_and_arguments_are_defined():
    bases = all_of("FROM")
    assert len(bases) == STAGES
    stages = {base.split(" AS ")[1] for base in bases if " AS " in base}
    text = DOCKERFILE.read_text()
    assert set(re.findall(r"\bfrom=(\w+)", text)) <= stages
    arguments = {rest.split("=")[0] for rest in all_of("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", text)) == arguments
    for name in arguments:
        assert re.search(rf"^#   {name} ", text, re.M), f"the comment does not explain {name}"
    defaults = dict(rest.split("=", 1) for rest in all_of("ARG") if "=" in rest)
    assert f"torch=={defaults['TORCH']}" in (ROOT / "Makefile").read_text()
    page = (ROOT / "docs/installation.md").read_text()
    major = defaults["CUDA"].split(".")[0]
    assert f"CUDA {major} for `{defaults['TORCH']}+cu{major}" in page


def test_pip_installs_what_pyproject_requires():
    installs = [word for command in pip_commands() for word in command if command[0] == "install"]
    requirements = pyproject()["build-system"]["requires"]
    assert [word for word in installs if word in requirements] == requirements
    (wheel,) = re.findall(r"/wheels/\*\.whl\)\[([\w,]+)\]", DOCKERFILE.read_text())
    assert set(wheel.split(",")) <= pyproject()["project"]["optional-dependencies"].keys()


def test_pip_and_cmake_know_the_options():
    for subcommand in ("install", "wheel"):
        done = subprocess.run([sys.executable, "-m", "pip", subcommand, "--help"], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip("needs pip")
        options = {
            word for command in pip_commands() for word in command if command[0] == subcommand and word[:2] == "--"
        }
        assert options and options <= set(re.findall(r"--[a-z-]+", done.stdout + "--no-cache-dir"))
    defined = set(re.findall(r"cmake\.define\.(\w+)=", DOCKERFILE.read_text()))
    lists = (ROOT / "CMakeLists.txt").read_text()
    assert len(defined) == 2 and all(re.search(rf"(set|option)\({name} ", lists) for name in defined)
