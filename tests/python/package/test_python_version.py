"""The oldest supported Python is the same everywhere. `make lint` checks the code against it."""

import re
from pathlib import Path

from support.project import project_table

ROOT = Path(__file__).parents[3]


def test_every_tool_and_page_names_the_oldest_python():
    oldest = project_table()["requires-python"].removeprefix(">=")
    found = {
        "pyproject.toml": rf'target-version = "py{oldest.replace(".", "")}"',
        "Makefile": rf"OLDEST_PYTHON := {oldest}\n",
        ".pre-commit-config.yaml": rf"--target={oldest}-\n",
        "CMakeLists.txt": rf"find_package\(Python {oldest} ",
        "cmake/SbTorch.cmake": rf"find_package\(Python {oldest} ",
        "README.md": f"Python {oldest} or later",
        "docs/installation.md": f"Python {oldest} or later",
    }
    for path, pattern in found.items():
        assert re.search(pattern, (ROOT / path).read_text()), f"{path} lacks {pattern}"
