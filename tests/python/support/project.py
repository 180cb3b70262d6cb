"""What pyproject.toml says about this project."""

from pathlib import Path
from typing import Any

try:
    import tomllib  # novm: vermin need not find it in Python 3.10
except ModuleNotFoundError:
    import tomli as tomllib  # Python 3.10: pytest installs tomli there


def pyproject() -> dict[str, Any]:
    """Return all tables."""
    return tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())


def project_table() -> dict[str, Any]:
    """Return the table [project]."""
    return pyproject()["project"]
