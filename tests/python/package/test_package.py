"""The package as a whole: versions, the shell command, and the CMake package for C++ users."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.libtorch import write_libtorch
from support.messages import mentions
from support.project import project_table

import megatron_sb
from megatron_sb import cli, selfcheck, torch_version
from megatron_sb.ops import library

ROOT = Path(__file__).parents[3]
CMAKE = Path(sys.executable).with_name("cmake")


def test_version_and_torch_are_those_of_the_build():
    assert megatron_sb.__version__ == library.build_info()["version"]
    built_with = torch.ops.megatron_sb.torch_version()
    assert torch_version.major_minor(built_with) == torch_version.major_minor(torch.__version__)
    assert library.library_path().parent.name == "torch{}.{}".format(*torch_version.major_minor(built_with))


@pytest.mark.parametrize("package", ["megatron_sb", "megatron_sb.megatron", "megatron_sb.training"])
def test_dir_lists_public_names_before_their_first_use(package):
    program = (
        f"import {package} as package; print(*{{*package.__all__}} - {{*dir(package)}}, '__doc__' in dir(package))"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["True"]


def test_the_annotations_are_for_type_checkers():
    assert (ROOT / "megatron_sb" / "py.typed").is_file()


def test_library_has_no_python_symbol():
    symbols = subprocess.run(["nm", "-D", library.library_path()], check=True, capture_output=True, text=True).stdout
    assert "block_forward" in symbols
    assert not [line for line in symbols.splitlines() if " Py" in line or " _Py" in line]


def test_info_names_build_and_kernels(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"built with {torch.ops.megatron_sb.torch_version()}; libraries for {', '.join(library.libraries())}" in text
    assert ("CPU BUILD" in text) == (library.build_info()["cuda"] is None)
    assert "cpu: CPU; fp32, fp64, bf16, fp16" in text


def test_check_passes(capsys):
    assert cli.main(["check"]) == 0
    assert "all cases pass" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "message"), [(1.05, r"FAIL.*: worst \w+ 5\.0e-02"), (math.nan, "worst mass nan")])
def test_check_fails_with_a_wrong_kernel(factor, message, monkeypatch, capsys):
    """It names the worst result, also if its error is not a number."""
    attention = selfcheck.stickbreaking_attention_varlen

    def wrong_attention(*arguments, **options):
        o, mass = attention(*arguments, **options)
        return (o, mass * factor) if math.isnan(factor) else (o * factor, mass)

    monkeypatch.setattr(selfcheck, "stickbreaking_attention_varlen", wrong_attention)
    monkeypatch.setattr(selfcheck, "CASES", selfcheck.CASES[:1])
    assert cli.main(["check"]) == 1
    printed = capsys.readouterr().out
    assert re.search(message, printed) and "1 cases FAILED" in printed


def test_the_error_of_an_unknown_command_names_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["trian"])
    assert re.search(mentions("'trian' train check bench"), capsys.readouterr().err)


def test_commands_raise_their_own_type_of_error():
    """The command line would show a traceback for a plain ValueError that is about the user's input."""
    folders = (ROOT / "megatron_sb" / name for name in ("training", "experiments", "checkpoints"))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        plain = re.search(r"raise (ValueError|TypeError|FileNotFoundError)\b", path.read_text())
        assert plain is None, f"{path}: raise megatron_sb.validation.InputError instead of {plain[1]}"


def test_info_as_json_has_what_the_text_has(capsys, monkeypatch):
    """Every value of the text that differs between machines is in the JSON."""
    monkeypatch.setenv("MEGATRON_SB_WORKSPACE_MIB", "128")
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert facts["version"] == megatron_sb.__version__ and facts["torch"]["version"] == torch.__version__
    assert facts["environment"]["MEGATRON_SB_WORKSPACE_MIB"] == "128"
    assert len(facts["gpus"]) == torch.cuda.device_count()
    leaves = [facts["library"], facts["build"]["compiler"], facts["python"]["version"], facts["cpu"]["instruction_set"]]
    leaves += [kernel["name"] + ": " + kernel["serves"] for kernel in facts["kernels"]]
    leaves += facts["build"]["cuda_architectures"]
    leaves += [value for value in (facts["build"]["cuda"], *facts["packages"].values()) if value]
    assert len(facts["kernels"]) >= 2
    for leaf in leaves:
        assert leaf in text, leaf


def test_info_prints_one_form(capsys):
    with pytest.raises(SystemExit):
        cli.main(["info", "--json", "--cmake-prefix"])
    assert re.search(mentions("--json --cmake-prefix"), capsys.readouterr().err)


# Only torch, numpy and what they require can be imported.
WITHOUT_OPTIONAL_MODULES = """
import importlib.abc
import importlib.metadata
import re
import sys

wanted, found = ["torch", "numpy"], set()
while wanted:
    name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
    if name in found:
        continue
    found.add(name)
    try:
        requirements = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    wanted += [re.match(r"[\\w.-]+", line).group() for line in requirements if "extra ==" not in line]
modules = {"megatron_sb", *sys.stdlib_module_names}
modules |= {name.replace("-", "_") for name in found}  # in Python 3.10, packages_distributions lacks some of these
for module, owners in importlib.metadata.packages_distributions().items():
    modules |= {module} if found & {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners} else set()


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in modules:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
from megatron_sb.cli import main

sys.exit(main(sys.argv[1:]))
"""


def _run_without_optional_modules(*command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    python = [sys.executable, "-c", WITHOUT_OPTIONAL_MODULES]
    return subprocess.run([*python, *command], env=environment, capture_output=True, text=True, timeout=120)


BENCH = ("bench", "--device", "cpu", "--dtype", "fp32", "--lengths", "16", "--repeats", "1", "--memory-length")


@pytest.mark.parametrize("command", [("info",), ("check",), (*BENCH, "0"), (*BENCH, "64", "--memory-worker", "full")])
def test_torch_and_numpy_are_enough_for_the_operators(command):
    run = _run_without_optional_modules(*command)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_other_modules_are_hidden_from_these_commands():
    run = _run_without_optional_modules(*BENCH, "0", "--out", "plots")
    assert run.returncode == 2
    assert re.search(mentions("bench matplotlib pip install 'megatron-sb[train]'"), run.stderr) and not run.stdout


# A module that is None in sys.modules cannot be imported.
WITHOUT_A_MODULE = """
import sys
from megatron_sb.cli import main
missing, *command = sys.argv[1:]
sys.modules[missing] = None
sys.exit(main(command))
"""


@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        ("yaml", "train", ["train", "configs/tiny_context_extension.yaml"]),
        ("tqdm", "train", ["experiment", "--help"]),
        ("matplotlib", "train", ["bench", "--out", "plots"]),
        ("transformers", "huggingface", ["convert", "from", "to", "--to", "fla"]),
    ],
)
def test_without_an_optional_module_the_command_names_the_extra_to_install(missing, extra, command, tmp_path):
    """The error comes before anything is measured or written, and has no traceback."""
    pytest.importorskip("yaml")  # `convert` imports it before transformers
    python = [sys.executable, "-c", WITHOUT_A_MODULE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [*python, missing, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2
    message = run.stderr.splitlines()[-1]
    assert re.search(mentions(f"megatron-sb {command[0]} {missing} pip install 'megatron-sb[{extra}]'"), message)
    assert "Traceback" not in run.stderr and not run.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["megatron_sb.selfcheck", "no_extra_has_this"])
def test_another_missing_module_raises_its_own_error(missing, monkeypatch):
    """No extra installs this module, so the error of the import is not replaced."""

    def run():
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(selfcheck, "main", run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["check"])


def test_the_command_knows_the_extra_of_every_optional_module():
    extras = project_table()["optional-dependencies"]
    modules = {"PyYAML": "yaml", "megatron-core": "megatron"}  # the modules that are not named like their distribution
    wanted = {}
    for extra in ("train", "huggingface"):
        for requirement in extras[extra]:
            name = re.match(r"[\w-]+", requirement).group()
            wanted[modules.get(name, name)] = extra
    assert wanted == cli.EXTRAS


def _configured_cpp_example(folder: Path, *definitions: str) -> tuple[Path, str]:
    """Configure the C++ example and return its build folder and the commands of the build, without the folder."""
    prefix = library.library_path().parents[2]
    configure = [CMAKE, "-S", ROOT / "examples/cpp", "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}", *definitions]
    options = {"check": True, "capture_output": True, "text": True, "timeout": 300}
    subprocess.run(configure, **options)
    commands = subprocess.run([CMAKE, "--build", folder, "--verbose", "--", "-n"], **options).stdout
    return folder, commands.replace(str(folder), "BUILD")


def test_the_cpp_example_builds_with_the_installed_package_and_runs(tmp_path):
    """The program prints the largest error of sum(A) + mass = 1. With SB_TORCH_ROOT, CMake needs no Python."""
    build, commands = _configured_cpp_example(tmp_path / "python", f"-DPython_EXECUTABLE={sys.executable}")
    torch_root = f"-DSB_TORCH_ROOT={Path(torch.__file__).parent}"
    _, same = _configured_cpp_example(tmp_path / "root", torch_root, "-DPython_EXECUTABLE=/there-is-no-python")
    assert "attention.cpp" in commands
    assert same == commands
    subprocess.run([CMAKE, "--build", build], check=True, capture_output=True, text=True, timeout=300)
    printed = subprocess.run([build / "attention"], check=True, capture_output=True, text=True, timeout=300).stdout
    assert float(printed) < 5e-6


def test_cmake_names_the_versions_of_torch_that_a_cpp_program_can_use(tmp_path):
    root = write_libtorch(tmp_path / "libtorch", "2.99.0")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        _configured_cpp_example(tmp_path / "build", f"-DSB_TORCH_ROOT={root}")
    versions = ", ".join(f"torch{version}" for version in library.libraries())
    assert re.search(mentions(f"{versions} 2.99.0 {root}"), " ".join(failure.value.stderr.split()))


def _configure_without_nvcc(folder: Path, with_cuda: str) -> subprocess.CompletedProcess:
    """Configure this project with -DSB_WITH_CUDA=WITH_CUDA and without nvcc on PATH."""
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not shutil.which("nvcc", path=p))
    environment = {name: value for name, value in os.environ.items() if name != "CUDACXX"} | {"PATH": path}
    command = [CMAKE, "-S", ROOT, "-B", folder, f"-DSB_WITH_CUDA={with_cuda}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DSB_BUILD_PYTHON=OFF"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_cuda_build_without_nvcc_fails(tmp_path):
    run = _configure_without_nvcc(tmp_path, "ON")
    assert run.returncode != 0
    assert re.search(mentions("SB_WITH_CUDA=ON nvcc"), run.stderr)


def test_an_automatic_build_without_nvcc_warns_that_it_is_a_cpu_build(tmp_path):
    run = _configure_without_nvcc(tmp_path, "AUTO")
    assert run.returncode == 0, run.stderr
    assert re.search(mentions("CPU BUILD nvcc"), run.stderr)
