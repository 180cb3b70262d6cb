"""The package as a whole: what it says of itself, the shell command, and the C++ package that it installs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import megatron_sb
from megatron_sb import cli, selfcheck
from megatron_sb.ops import library

ROOT = Path(__file__).parents[3]


def test_version_and_torch_match():
    assert megatron_sb.__version__ == library.build_info()["version"]
    assert library.build_info()["torch"] == torch.__version__


@pytest.mark.parametrize("installed", ["2.10.0+cu130", "2.11.1+cpu", "2.12.0+cu130"])
def test_another_torch_is_refused(installed):
    with pytest.raises(ImportError, match=r"built with torch 2\.11\.0\+cu130, but torch 2\.1"):
        library.check_torch("2.11.0+cu130", installed)


def test_a_patch_release_of_torch_is_accepted():
    library.check_torch("2.11.0+cu130", "2.11.1+cu130")


def test_library_holds_no_python_symbol():
    symbols = subprocess.run(["nm", "-D", library.library_path()], check=True, capture_output=True, text=True).stdout
    assert "block_forward" in symbols
    assert not [line for line in symbols.splitlines() if " Py" in line or " _Py" in line]


def test_info_names_build_and_kernels(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert f"built with {library.build_info()['torch']}" in text
    assert ("CPU BUILD" in text) == (library.build_info()["cuda"] is None)
    assert "cpu: CPU; fp32, fp64, bf16, fp16" in text


def test_check_passes(capsys):
    assert cli.main(["check"]) == 0
    assert "all cases pass" in capsys.readouterr().out


def test_check_notices_a_wrong_kernel(monkeypatch, capsys):
    right = selfcheck.stickbreaking_attention_varlen

    def slightly_wrong(*arguments, **options):
        o, mass = right(*arguments, **options)
        return o * 1.05, mass

    monkeypatch.setattr(selfcheck, "stickbreaking_attention_varlen", slightly_wrong)
    assert cli.main(["check"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_an_unknown_command_says_what_there_is(capsys):
    with pytest.raises(SystemExit):
        cli.main(["trian"])
    assert "invalid choice: 'trian'" in capsys.readouterr().err


# None in sys.modules is a module that cannot be found.
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
def test_a_module_that_is_not_installed_is_one_sentence(missing, extra, command, tmp_path):
    """And comes first: nothing is measured or written."""
    pytest.importorskip("yaml")  # which convert asks for before transformers
    python = [sys.executable, "-c", WITHOUT_A_MODULE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [*python, missing, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1] == (
        f"megatron-sb: {command[0]} needs the module {missing}, which is not installed: pip install '.[{extra}]' "
        "in the sources of megatron_sb"
    )
    assert "Traceback" not in run.stderr and not run.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["megatron_sb.selfcheck", "no_extra_has_this"])
def test_another_module_that_is_missing_is_a_defect(missing, monkeypatch):
    def run():
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(selfcheck, "main", run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["check"])


def test_every_optional_module_is_known_by_its_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = {"PyYAML": "yaml", "megatron-core": "megatron"}  # named unlike what is installed
    wanted = {}
    for extra in ("train", "huggingface"):
        for requirement in extras[extra]:
            name = re.match(r"[\w-]+", requirement).group()
            wanted[modules.get(name, name)] = extra
    assert wanted == cli.EXTRAS


def test_cpp_consumer_builds_and_runs(tmp_path):
    prefix = library.library_path().parents[1]
    configure = ["cmake", "-S", ROOT / "tests/consumer", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
    tool = {"cwd": tmp_path, "check": True, "capture_output": True, "text": True, "timeout": 300}
    cmake = Path(sys.executable).with_name("cmake")
    subprocess.run([cmake, *configure[1:]], **tool)
    subprocess.run([cmake, "--build", tmp_path], **tool)
    printed = subprocess.run([tmp_path / "consumer"], **tool).stdout
    assert float(printed) < 5e-6


def _configure_without_nvcc(folder: Path, with_cuda: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not shutil.which("nvcc", path=p))
    environment = {name: value for name, value in os.environ.items() if name != "CUDACXX"} | {"PATH": path}
    command = [Path(sys.executable).with_name("cmake"), "-S", ROOT, "-B", folder, f"-DSB_WITH_CUDA={with_cuda}"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DSB_BUILD_PYTHON=OFF"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_cuda_asked_for_without_nvcc_fails(tmp_path):
    run = _configure_without_nvcc(tmp_path, "ON")
    assert run.returncode != 0
    assert "SB_WITH_CUDA=ON, but there is no nvcc" in " ".join(run.stderr.split())


def test_a_build_without_nvcc_says_that_it_is_a_cpu_build(tmp_path):
    run = _configure_without_nvcc(tmp_path, "AUTO")
    assert run.returncode == 0, run.stderr
    assert "this is a CPU BUILD, because there is no nvcc" in " ".join(run.stderr.split())


@pytest.mark.gpu
def test_segment_table_is_made_on_the_gpu():
    cu_seqlens = torch.tensor([0, 3, 3, 70, 64, 1000], dtype=torch.int32)
    table = torch.ops.megatron_sb.segments(cu_seqlens.cuda(), cu_seqlens.cuda(), 500, 500).cpu()
    begin = cu_seqlens[:-1].clamp(0, 500)
    length = (torch.maximum(cu_seqlens[1:].clamp(max=500), begin) - begin).to(torch.int32)
    want = torch.stack([begin, length, begin, length, torch.zeros_like(length)], dim=1)
    assert torch.equal(table, want)


@pytest.mark.gpu
def test_attention_on_a_gpu_names_what_is_missing():
    q = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"no attention kernel for CUDA sm_\d+, fp64"):
        megatron_sb.stickbreaking_attention(q, q, q)
