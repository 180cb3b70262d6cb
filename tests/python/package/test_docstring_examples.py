"""The examples in docstrings run and print the output that they show. All public objects have one."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import megatron_sb

ROOT = Path(__file__).parents[3]
PACKAGE = Path(megatron_sb.__file__).parent
# The modules with an example, without `megatron_sb.`
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)
CONFIGURATION = ("pydantic", "yaml")
# Optional packages that a module, or the modules of a package, need.
NEEDED = {
    "checkpoints": ("transformers", *CONFIGURATION),
    "experiments": ("megatron.core", "matplotlib", *CONFIGURATION),
    "generation": CONFIGURATION,
    "huggingface": ("transformers",),
    "megatron": ("megatron.core",),
    "planning": CONFIGURATION,
    "training": ("megatron.core", "matplotlib", *CONFIGURATION),
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    for package in NEEDED.get(name.partition(".")[0], ()):
        pytest.importorskip(package)
    monkeypatch.chdir(ROOT)  # some examples read a file of configs
    found = doctest.testmod(importlib.import_module(f"megatron_sb.{name}"))
    assert found.attempted > 0 and found.failed == 0


@pytest.mark.parametrize("name", megatron_sb.__all__)
def test_public_object_has_an_example(name):
    assert "Example:" in inspect.getdoc(getattr(megatron_sb, name))
