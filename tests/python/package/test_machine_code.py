"""Properties of the compiled GPU kernels that a harmless-looking change of the source can break, at a loss of speed."""

import itertools
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron_sb.ops import library

KERNELS = library.library_path().parents[1] / "libmegatron_sb_kernels.so"
BUILD = library.build_info()
ARCHITECTURES = BUILD["cuda_architectures"]
BYTES = 16  # of an instruction
needs_cuda_build = pytest.mark.skipif(not ARCHITECTURES, reason="needs a build with CUDA")


def tool(name: str) -> Path:
    """Return the path of cuobjdump or nvdisasm, or skip the test."""
    triton = pytest.importorskip("triton", reason=f"needs {name}, which is a part of triton")
    return Path(triton.__file__).parent / "backends/nvidia/bin" / name


def sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, number, of_names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<I20x2Q", cubin, table + i * size) for i in range(number)]
    names = headers[of_names][1]
    for name, begin, length in headers:
        yield cubin[names + name : cubin.index(b"\0", names + name)].decode(), cubin[begin : begin + length]


def instructions_of_kernels(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Return (address, instruction) of the kernels of csrc/kernels/hopper, by mangled name. Writes files to `folder`.

    Only these kernels can have products (HGMMA): CMakeLists.txt compiles no others for sm_90a. All are disassembled
    together, so an address counts from the first kernel: nvdisasm takes 0.4 s to start, most of its time for a kernel.
    """
    options = {"cwd": folder, "capture_output": True, "text": True, "check": True, "timeout": 120}
    subprocess.run([tool("cuobjdump"), "-xelf", "sm_90", KERNELS], **options)
    cubins = [path.read_bytes() for path in sorted(folder.glob("*.cubin"))]
    kernels = {
        name.removeprefix(".text."): code
        for cubin in cubins
        if b"6hopper" in cubin
        for name, code in sections(cubin)
        if name.startswith(".text.")
    }
    (folder / "kernels.bin").write_bytes(b"".join(kernels.values()))
    text = subprocess.run([tool("nvdisasm"), "--binary", "SM90a", "kernels.bin"], **options).stdout
    lines = iter([(int(at, 16), i) for at, i in re.findall(r"/\*([0-9a-f]+)\*/\s+(.*?);", text)])
    found = {name: list(itertools.islice(lines, len(code) // BYTES)) for name, code in kernels.items()}
    end = sum(map(len, kernels.values()))
    assert next(lines, None) is None and [*found.values()][-1][-1][0] == end - BYTES, "an instruction has no line"
    return found


def innermost_loops_of_products(code: list[tuple[int, str]]) -> list[list[str]]:
    """Return the instructions of every loop with a product (HGMMA) but without a smaller loop with one."""
    index_of = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for end, (_, instruction) in enumerate(code):
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)$", instruction.strip())
        begin = index_of.get(int(target[1], 16)) if target else None
        if begin is not None and begin <= end and any("HGMMA" in i for _, i in code[begin : end + 1]):
            loops.append((begin, end))
    return [
        [i for _, i in code[begin : end + 1]]
        for begin, end in loops
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in loops)
    ]


@needs_cuda_build
def test_the_library_has_the_machine_code_that_it_reports():
    """Every file of portable kernels has PTX, for other GPUs, and code of each architecture. Hopper's have sm_90's."""
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=120)
    ptx = run([tool("cuobjdump"), "--list-ptx", KERNELS]).stdout
    machine_code = run([tool("cuobjdump"), "--list-elf", KERNELS]).stdout
    num_files = Counter(re.findall(r"\.(sm_\d+)\.", machine_code))
    assert [*Counter(re.findall(r"\.(sm_\d+)\.", ptx))] == ["sm_80"]
    assert num_files.keys() == {f"sm_{architecture}" for architecture in ARCHITECTURES}
    num_portable = len(ptx.strip().splitlines())
    for name, number in num_files.items():
        assert number > num_portable if name == "sm_90" else number == num_portable, name


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """Return the kernels with products, by name: bf16 and fp16, forward and backward.

    A build with SB_FAST_COMPILE compiles those for fp16 without most optimisations. They are left out.
    """
    if 90 not in ARCHITECTURES:
        pytest.skip("needs a build with the Hopper kernels")
    found = instructions_of_kernels(tmp_path_factory.mktemp("cubins"))
    found = {name: code for name, code in found.items() if any("HGMMA" in i for _, i in code)}
    if BUILD["fast_compile"]:
        found = {name: code for name, code in found.items() if "bfloat16" in name}
    # 64, 72, 96, 128 and 136 columns with and without forget gates, 192 and 256 without
    assert len(found) >= (24 if BUILD["fast_compile"] else 48)
    return found


def test_products_are_not_serialised(kernels):
    """A loop waits for its products two or three times, not after each.

    ptxas waits after each product of a kernel if a warpgroup has too few registers for it, and only prints "C7512,
    Potential Performance Loss". The backward for 72 columns then took 12% longer.
    """
    for name, code in kernels.items():
        for loop in innermost_loops_of_products(code):
            products, waits = (sum(word in i for i in loop) for word in ("HGMMA", "WARPGROUP.DEPBAR"))
            assert products >= 8 and 1 <= waits <= 3, name


def test_wgmma_descriptors_stay_in_uniform_registers(kernels):
    """Otherwise each wgmma waits for moves (R2UR), for example if the end of a loop does not look uniform to ptxas.

    The forward then loses 5% of its speed. The backward at head_dim 96 and 128 reads the address of dq from shared
    memory. This needs two moves, and two more with 136 columns. The backward at head_dim 64 moves the flags of a step
    between two products.
    """
    for name, code in kernels.items():
        loops = innermost_loops_of_products(code)
        backward, narrow = "8backward" in name, "Li64E" in name
        assert len(loops) >= (3 if backward and narrow else 2 if backward else 1), name
        allowed = 0 if not backward else 1 if narrow else 4 if "Li136E" in name else 2
        for loop in loops:
            products = [i for i, instruction in enumerate(loop) if "HGMMA" in instruction]
            moves = 0
            for first, second in itertools.pairwise(products):
                between = loop[first:second]
                if len(between) < 16:
                    moves += sum("R2UR" in instruction for instruction in between)
            assert moves <= allowed, name
