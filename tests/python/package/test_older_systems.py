"""The libraries load on systems with glibc 2.28, such as RHEL 8, and the module with every version of Python.

cmake/SbOlderSystems.cmake says how. auditwheel gives a wheel the tag manylinux_2_28 only if its libraries need no newer
symbols of the system.
"""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_sb.ops import library

# The newest versions of symbols in manylinux_2_28, as auditwheel lists them.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# What csrc/core/older_systems.cpp defines.
DEFINED_INSIDE = re.compile(
    r"__libc_single_threaded$|_ZSt28__throw_bad_array_new_lengthv$|"
    r"_ZNSt7__cxx1119basic_ostringstreamIc.*EC[12]Ev$|_ZNKRSt7__cxx1115basic_stringbufIc.*E3strEv$"
)
COMPILER = library.build_info()["compiler"]
needs_objdump = pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")


def too_new(symbols: str) -> list[str]:
    """Return the symbols that manylinux_2_28 lacks, in the output of `objdump -T`."""
    needed = re.findall(r"\*UND\*\s+\S+\s+\(?([A-Z]+)_([\d.]+)\)?\s+(\S+)", symbols)
    return [
        f"{name} ({family}_{version})"
        for family, version, name in needed
        if family in NEWEST and tuple(map(int, version.split("."))) > NEWEST[family]
    ]


def exported(symbols: str) -> list[str]:
    """Return the symbols that a library defines for others, in the output of `objdump -T`."""
    return [line.split()[-1] for line in symbols.splitlines() if re.match(r"[0-9a-f]{8}", line) and "*UND*" not in line]


def symbols_of_libraries() -> dict[str, str]:
    """Return the output of `objdump -T` for each compiled file of the package."""
    operators = list(library.libraries().values())
    module = importlib.util.find_spec("megatron_sb._C").origin
    paths = [*operators, operators[0].parents[1] / "libmegatron_sb_kernels.so", Path(module)]
    run = {"capture_output": True, "text": True, "check": True}
    return {str(path): subprocess.run(["objdump", "-T", path], **run).stdout for path in paths}


def test_versions_are_compared_as_numbers():
    text = """
0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.2.5) memcpy
0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.34) dlsym
0000000000000000      DF *UND*\t0000000000000000  GLIBCXX_3.4.9 older_binutils
0000000000000000      DF *UND*\t0000000000000000 (GCC_12.0.0) __extendhfsf2
0000000000000000      DF *UND*\t0000000000000000 (libcudart.so.13) cudaFree
0000000000000000  w   DF *UND*\t0000000000000000  Base        __gmon_start__
00000000000f2e10 g    DF .text\t0000000000000123  Base        ours
"""
    assert too_new(text) == ["dlsym (GLIBC_2.34)", "__extendhfsf2 (GCC_12.0.0)"]
    assert exported(text) == ["ours"]


@needs_objdump
@pytest.mark.skipif(not COMPILER.startswith("GNU 12."), reason=f"tried with g++ 12, and built with {COMPILER}")
def test_no_library_needs_a_newer_system():
    """Avoid the symbol in the sources, or define it in csrc/core/older_systems.cpp."""
    found = {path: too_new(symbols) for path, symbols in symbols_of_libraries().items()}
    assert not any(found.values()), found


@needs_objdump
def test_the_definitions_stay_inside():
    """Else other libraries of the process would use them."""
    found = {path: exported(symbols) for path, symbols in symbols_of_libraries().items()}
    assert all(found.values())
    assert not [name for names in found.values() for name in names if DEFINED_INSIDE.match(name)]


def test_the_module_serves_every_version_of_python():
    """Else each version of Python would need wheels of its own."""
    assert importlib.util.find_spec("megatron_sb._C").origin.endswith("/_C.abi3.so")
