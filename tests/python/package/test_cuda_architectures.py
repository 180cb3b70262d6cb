"""SB_CUDA_ARCHITECTURES selects the GPUs that get machine code. CMake reports a bad value before it compiles."""

import os
import re
import shutil

import pytest
from support.cmake import configure, needs_cmake, run_script
from support.libtorch import write_libtorch
from support.messages import mentions

from megatron_sb import info

NVCC = os.environ.get("CUDACXX") or shutil.which("nvcc")
CUDA_12_4 = "80;86;87;89;90"
CUDA_13_0 = "80;86;87;88;89;90;100;103;110;120;121"


def choose(folder, requested: str, known: str = CUDA_13_0, version: str = "13.0.88") -> tuple[int, str]:
    """Run sb_choose_architectures and sb_portable_gencode. Return the exit status and the output."""
    call = f'sb_choose_architectures(chosen "{requested}" "{known}" "{version}")\n'
    call += 'sb_portable_gencode(gencode ${chosen})\nmessage(STATUS "${gencode}")'
    return run_script(folder, "SbArchitectures", call)


@needs_cmake
@pytest.mark.parametrize(
    ("requested", "known", "codes"),
    [
        ("80;90", CUDA_13_0, "sm_80,sm_90"),
        ("120", CUDA_13_0, "sm_120"),
        ("120;86;100;86", CUDA_13_0, "sm_86,sm_100,sm_120"),  # sorted as numbers, each once
        ("103", CUDA_13_0, "sm_103"),
        ("all", CUDA_13_0, "sm_80,sm_86,sm_89,sm_90,sm_100,sm_120"),
        ("all", CUDA_12_4, "sm_80,sm_86,sm_89,sm_90"),
    ],
)
def test_each_architecture_gets_machine_code_and_all_others_ptx(requested, known, codes, tmp_path):
    status, output = choose(tmp_path, requested, known)
    assert status == 0, output
    assert output == f"-- arch=compute_80,code=[{codes},compute_80] -- end of script"


@needs_cmake
@pytest.mark.parametrize(
    ("requested", "known", "words"),
    [
        ("80;sm_90", CUDA_13_0, "all 80;90 sm_90"),
        ("90a", CUDA_13_0, "all 80;90 90a"),
        ("8.6", CUDA_13_0, "all 80;90 8.6"),
        ("80,90", CUDA_13_0, "all 80;90 80,90"),
        ("native", CUDA_13_0, "all 80;90 native"),
        ("all;90", CUDA_13_0, "all 80;90 all;90"),
        ("75", CUDA_13_0, f"75 sm_80 all {CUDA_13_0}"),
        ("80;70", CUDA_13_0, f"70 sm_80 all {CUDA_13_0}"),
        ("99", CUDA_13_0, f"99 13.0.88 {CUDA_13_0} CUDACXX sm_99 PTX"),
        ("90;120", CUDA_12_4, f"120 13.0.88 {CUDA_12_4} CUDACXX sm_120 PTX"),
        ("", CUDA_13_0, f"empty all {CUDA_13_0}"),
    ],
)
def test_a_bad_value_is_an_error(requested, known, words, tmp_path):
    status, output = choose(tmp_path, requested, known)
    assert status != 0 and "end of script" not in output
    assert re.search(mentions(f"SB_CUDA_ARCHITECTURES {words}"), output), output


@needs_cmake
@pytest.mark.skipif(not NVCC, reason="needs nvcc")
def test_nvcc_lists_its_architectures(tmp_path):
    status, output = run_script(tmp_path, "SbArchitectures", f'sb_known_architectures(k "{NVCC}")\nmessage("<${{k}}>")')
    assert status == 0, output
    known = [int(number) for number in re.search("<(.*)>", output)[1].split(";")]
    assert {80, 86, 89, 90} <= set(known) and min(known) == 80 and known == sorted(known)


@needs_cmake
@pytest.mark.skipif(not NVCC, reason="needs nvcc")
def test_the_project_refuses_an_architecture_that_nvcc_does_not_compile(tmp_path):
    root = write_libtorch(tmp_path / "libtorch", "2.11.0", cuda="unknown")
    status, output = configure(tmp_path, f"-DSB_TORCH_ROOT={root}", "-DSB_CUDA_ARCHITECTURES=80;99")
    assert status != 0
    assert re.search(mentions("SB_CUDA_ARCHITECTURES 99 nvcc"), output), output


@pytest.mark.parametrize(
    ("capability", "architectures", "code"),
    [
        (80, [80, 90], "sm_80"),
        (86, [80, 90], "sm_80"),  # the machine code of an older GPU of the same generation
        (89, [80, 86, 90], "sm_86"),
        (90, [80, 90], "sm_90"),
        (120, [80, 90], "compute_80"),
        (80, [86], "compute_80"),  # the machine code of a newer GPU does not run
        (103, [80, 100], "sm_100"),
        (121, [100, 120], "sm_120"),
        (75, [80, 90], None),
        (90, [], None),  # a CPU build
    ],
)
def test_info_knows_which_code_a_gpu_runs(capability, architectures, code):
    assert info.code_for(capability, architectures) == code


@pytest.mark.parametrize(
    ("capability", "words"),
    [(86, "sm_86 code sm_80"), (120, "sm_120 driver SB_CUDA_ARCHITECTURES=120"), (75, "sm_75 not supported sm_80")],
)
def test_info_says_what_to_do_without_machine_code(capability, words):
    facts = info.collect()
    facts["build"] |= {"cuda": "13.0.88", "cuda_architectures": ["sm_80", "sm_90"]}
    code = info.code_for(capability, [80, 90])
    facts["gpus"] = [{"name": "GPU", "capability": f"sm_{capability}", "memory_bytes": 2**35, "code": code}]
    text = info.to_text(facts)
    assert re.search(mentions("CUDA 13.0.88 sm_80, sm_90"), text)
    (line,) = [line for line in text.splitlines() if line.startswith("cuda:0")]
    assert re.search(mentions(words), line), line
