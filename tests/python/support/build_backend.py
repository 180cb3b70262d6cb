"""Call the hooks of the build backend, cmake/build_backend.py, as pip does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CPU = {"cmake.define.SB_WITH_CUDA": "OFF"}
CALL = """
import sys
sys.path.insert(0, "cmake")
import build_backend
hook, folder, settings = sys.argv[1:]
getattr(build_backend, hook)(folder, eval(settings))
"""


def call_hook(
    hook: str, folder: Path, settings: dict[str, str], root: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess:
    """Call a hook of the backend of the sources in `root`, in a process of its own. It writes to `folder`."""
    return subprocess.run(
        [sys.executable, "-c", CALL, hook, folder, repr(settings)],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
