"""The layout: files include and import only downward, and never in a circle.

A reader can then understand a folder from the folders below it, and a change cannot break what lies below. C++ kernels
build without Torch, and users who do not install Megatron-Core can import the library.
"""

import ast
import importlib.util
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CSRC, PACKAGE = ROOT / "csrc", ROOT / "megatron_sb"

# Floor by folder of csrc/, bottom first. Folders of one floor do not include each other.
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
    files = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [path for path in files if path.relative_to(CSRC).parts[0] != "include"]


def _python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _includes(path: Path) -> list[str]:
    return re.findall(r'#include [<"]([^">]+)[">]', path.read_text())


def _imported_modules(source: str, package: str) -> set[str]:
    """Full names of what a module in `package` imports, and of what it imports from there."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            modules.update((name, *(f"{name}.{alias.name}" for alias in node.names)))
    return modules


def _circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the names on one circle of the graph, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


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


def test_circles_are_found():
    assert _circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_every_module_has_a_floor():
    modules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _python_files()}
    assert modules - {"__init__"} == PYTHON_FLOORS.keys()


def test_there_are_files_to_read():
    assert len(_cpp_files()) > 20
    assert len(_python_files()) > 8


@pytest.mark.parametrize("path", _cpp_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_cpp_includes_downward(path):
    own = path.relative_to(CSRC).parts[0]
    for include in _includes(path):
        other = include.split("/")[0]
        if other in CPP_FLOORS and other != own:
            assert CPP_FLOORS[other] < CPP_FLOORS[own], f"{own} includes {include}"
        if own in TORCH_FREE:
            assert other not in ("ATen", "torch", "c10"), f"{own} includes {include} of Torch"


def test_cpp_has_no_circle():
    """x.h and x.cpp are one unit. CUDA files stand for themselves: a .cu consists of several .cuh files."""
    graph: dict[str, set[str]] = {}
    for path in _cpp_files():
        unit = str(path.relative_to(CSRC)).removesuffix(".h").removesuffix(".cpp")
        graph.setdefault(unit, set()).update({include.removesuffix(".h") for include in _includes(path)} - {unit})
    assert _circle(graph) == []


@pytest.mark.parametrize("path", _python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_imports_downward(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in _imported_modules(path.read_text(), ".".join(path.relative_to(ROOT).parts[:-1])):
        if module.startswith("megatron.core"):
            assert str(path.relative_to(ROOT)).startswith(MEGATRON_CORE), f"{path} imports {module}"
        if own == "__init__" or not module.startswith("megatron_sb."):
            continue
        other = module.split(".")[1]
        if other in PYTHON_FLOORS and other != own:
            assert PYTHON_FLOORS[other] < PYTHON_FLOORS[own], f"{own} imports {module}"


def test_python_has_no_circle():
    """Imports within functions count; imports for type checkers alone do not."""
    names = {}
    for path in _python_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in names.items():
        source = re.sub(r"^if TYPE_CHECKING:\n(?: .*\n|\n)+", "", path.read_text(), flags=re.MULTILINE)
        imported = _imported_modules(source, ".".join(path.relative_to(ROOT).parts[:-1])) & names.keys()
        # `from package import module` needs the module, not what the package's __init__ imports.
        graph[name] = {m for m in imported if not any(other.startswith(f"{m}.") for other in imported)} - {name}
    assert _circle(graph) == []


@pytest.mark.parametrize("path", [*_cpp_files(), *_python_files()], ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) < 600
