"""The layout: files include and import only downward, and never in a cycle.

A reader can therefore understand a folder from the folders below it, and a change in a folder cannot break these. C++
kernels build without Torch, and users without Megatron-Core can import the library.
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
    "processes": 0,
    "reference": 0,
    "torch_version": 0,
    "validation": 0,
    "options": 1,
    "ops": 2,
    "nn": 3,
    "baselines": 3,
    "bench": 3,
    "compat": 3,
    "info": 3,
    "selfcheck": 3,
    "integrations": 4,
    "huggingface": 4,
    "megatron": 4,
    "training": 5,
    "checkpoints": 6,
    "experiments": 6,
    "planning": 6,
    "generation": 7,
    "lm_evaluation": 7,
    "cli": 8,
}
# The folders that may import Megatron-Core: the adapter, and the trainer's engine.
MEGATRON_CORE = ("megatron_sb/megatron/", "megatron_sb/training/engine/")


def _cpp_files() -> list[Path]:
    files = [path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    return [path for path in files if path.relative_to(CSRC).parts[0] != "include"]


def _python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _includes(path: Path) -> list[str]:
    return re.findall(r'#include [<"]([^">]+)[">]', path.read_text())


def _imported_modules(source: str, package: str) -> set[str]:
    """Return the full names of the modules, and of the objects in them, that a module in `package` imports."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            modules.update((name, *(f"{name}.{alias.name}" for alias in node.names)))
    return modules


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the names on one cycle of the graph, or an empty list."""
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
def test_imported_modules(source, modules):
    assert _imported_modules(source, "megatron_sb.training") == modules


def test_cycle():
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_every_module_has_a_floor():
    modules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _python_files()}
    assert modules - {"__init__"} == PYTHON_FLOORS.keys()


def test_files_are_found():
    """Without files, the tests of this module would pass without a check."""
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


def test_cpp_includes_have_no_cycle():
    """x.h and x.cpp are one unit. Each CUDA file is a unit, because a .cu file includes several .cuh files."""
    graph: dict[str, set[str]] = {}
    for path in _cpp_files():
        unit = str(path.relative_to(CSRC)).removesuffix(".h").removesuffix(".cpp")
        graph.setdefault(unit, set()).update({include.removesuffix(".h") for include in _includes(path)} - {unit})
    assert _cycle(graph) == []


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


def test_python_imports_have_no_cycle():
    """Imports inside functions count. Imports under `if TYPE_CHECKING` do not count."""
    names = {}
    for path in _python_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for name, path in names.items():
        source = re.sub(r"^if TYPE_CHECKING:\n(?: .*\n|\n)+", "", path.read_text(), flags=re.MULTILINE)
        imported = _imported_modules(source, ".".join(path.relative_to(ROOT).parts[:-1])) & names.keys()
        # `from package import module` depends on the module, not on the imports of the package's __init__.
        graph[name] = {m for m in imported if not any(other.startswith(f"{m}.") for other in imported)} - {name}
    assert _cycle(graph) == []


@pytest.mark.parametrize("path", [*_cpp_files(), *_python_files()], ids=lambda path: str(path.relative_to(ROOT)))
def test_file_has_fewer_than_600_lines(path):
    assert len(path.read_text().splitlines()) < 600
