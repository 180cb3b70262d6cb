"""Files include and import only downward."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Floor by folder of csrc/, bottom first; folders of one floor do not include each other.
CPP_FLOORS = {"core": 1, "kernels": 2, "plan": 2, "dispatch": 3, "ops": 4, "distributed": 5, "bindings": 6}
TORCH_FREE = ("core", "kernels", "plan", "dispatch", "bindings")
PYTHON_FLOORS = {
    "_moved": 0,
    "_tasks": 0,
    "reference": 0,
    "validation": 0,
    "options": 1,
    "ops": 2,
    "nn": 3,
    "baselines": 3,
    "bench": 3,
    "compat": 3,
    "selfcheck": 3,
    "huggingface": 4,
    "megatron": 4,
    "training": 5,
    "checkpoints": 6,
    "experiments": 6,
    "cli": 7,
}
# What imports Megatron-Core: the adapter, and the trainer's engine.
MEGATRON_CORE = ("megatron_sb/megatron/", "megatron_sb/training/engine/")


def _cpp_files() -> list[Path]:
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [path for path in files if path.relative_to(ROOT / "csrc").parts[0] != "include"]


def _python_files() -> list[Path]:
    return sorted((ROOT / "megatron_sb").rglob("*.py"))


def _imported_modules(source: str, package: str) -> set[str]:
    """What the source of a module in `package` imports, with full names, and whatever is imported from it."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            modules.update((name, *(f"{name}.{alias.name}" for alias in node.names)))
    return modules


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import a.b, c", {"a.b", "c"}),
        ("from a.b import c", {"a.b", "a.b.c"}),
        ("from . import x", {"megatron_sb.training", "megatron_sb.training.x"}),
        ("from .x import y", {"megatron_sb.training.x", "megatron_sb.training.x.y"}),
        ("def f():\n    from ..cli import main", {"megatron_sb.cli", "megatron_sb.cli.main"}),
    ],
)
def test_imports_are_read(source, modules):
    assert _imported_modules(source, "megatron_sb.training") == modules


def test_every_module_has_a_floor():
    modules = {path.relative_to(ROOT / "megatron_sb").parts[0].removesuffix(".py") for path in _python_files()}
    assert modules - {"__init__"} == PYTHON_FLOORS.keys()


def test_there_are_files_to_read():
    assert len(_cpp_files()) > 20
    assert len(_python_files()) > 8


@pytest.mark.parametrize("path", _cpp_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_cpp_includes_downward(path):
    own = path.relative_to(ROOT / "csrc").parts[0]
    for include in re.findall(r'#include [<"]([^">]+)[">]', path.read_text()):
        other = include.split("/")[0]
        if other in CPP_FLOORS and other != own:
            assert CPP_FLOORS[other] < CPP_FLOORS[own], f"{own} includes {include}"
        if own in TORCH_FREE:
            assert other not in ("ATen", "torch", "c10"), f"{own} includes {include} of Torch"


@pytest.mark.parametrize("path", _python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_downward(path):
    own = path.relative_to(ROOT / "megatron_sb").parts[0].removesuffix(".py")
    for module in _imported_modules(path.read_text(), ".".join(path.relative_to(ROOT).parts[:-1])):
        if module.startswith("megatron.core"):
            assert str(path.relative_to(ROOT)).startswith(MEGATRON_CORE), f"{path} imports {module}"
        if own == "__init__" or not module.startswith("megatron_sb."):
            continue
        other = module.split(".")[1]
        if other in PYTHON_FLOORS and other != own:
            assert PYTHON_FLOORS[other] < PYTHON_FLOORS[own], f"{own} imports {module}"


@pytest.mark.parametrize("path", [*_cpp_files(), *_python_files()], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) < 600
