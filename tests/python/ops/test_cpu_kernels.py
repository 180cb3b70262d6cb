"""The CPU kernels: memory and results with many threads, and the choice of the instruction set."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.accuracy import run
from support.fork_server import run_python
from support.inputs import make_inputs

from megatron_sb import stickbreaking_attention, stickbreaking_attention_varlen

LONG_BACKWARD = """
import torch
import megatron_sb as sb

def peak():  # not that of getrusage, which starts at the peak of the parent process
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

torch.set_num_threads(64)
q, k, v = (torch.randn(1, 2**16, 1, 64, requires_grad=True) for _ in range(3))
o = sb.stickbreaking_attention(q, k, v)
d_o = torch.randn_like(o)
before = peak()
o.backward(d_o)
print(peak() - before)
"""


def run_code(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run code in a fork, with more environment variables. The library reads its variables in the first call."""
    script = folder / "script.py"
    script.write_text(code)
    return run_python([script], seconds=300, environment=variables)


def test_memory_of_the_backward_does_not_depend_on_the_number_of_threads():
    """64K keys of one head with 64 threads. dq, dk and dv need 48 MiB. A dk and dv for each thread would need 2 GiB."""
    done = subprocess.run([sys.executable, "-c", LONG_BACKWARD], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 256 * 2**20


SHAPES = [{"s": 700}, {"s": 1300, "h": 2}, {"b": 2, "s": 300, "h": 6, "h_kv": 2}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_bitwise_the_same_with_any_number_of_threads(shape):
    x, before, results = make_inputs("mean -6", d=24, **shape), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 32):
            torch.set_num_threads(threads)
            results.append(run(lambda q, k, v: stickbreaking_attention(q, k, v, return_mass=True), x))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for name in ("o", "mass", "dq", "dk", "dv"):
            assert torch.equal(result[name], results[0][name]), name


def outputs_and_gradients(attention, q, k, v, d_o):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*inputs)
    return [o, *torch.autograd.grad(o, inputs, d_o)]


def test_results_do_not_depend_on_other_heads_batch_elements_and_documents():
    """Bit for bit. The tasks of a document have up to four query tiles, and depend on its own length only."""
    length, shorter = 1300, 500
    x = make_inputs("mean -6", b=2, s=length, h=4, h_kv=2, d=24)
    tensors = (x.q, x.k, x.v, x.do)
    alone = outputs_and_gradients(stickbreaking_attention, *(t[:1, :, : t.shape[2] // 2] for t in tensors))
    whole = outputs_and_gradients(stickbreaking_attention, *tensors)
    for expected, found in zip(alone, whole, strict=True):
        assert torch.equal(expected, found[:1, :, : expected.shape[2]])

    offsets = torch.tensor([0, shorter, shorter + length], dtype=torch.int32)
    packed = outputs_and_gradients(
        lambda q, k, v: stickbreaking_attention_varlen(q, k, v, offsets, length),
        *(torch.cat([t[1, :shorter], t[0]])[:, : t.shape[2] // 2] for t in tensors),
    )
    for expected, found in zip(alone, packed, strict=True):
        assert torch.equal(expected[0], found[shorter:])


@pytest.mark.parametrize("level", ["avx1024", "AVX2", ""])
def test_an_unknown_instruction_set_is_an_error(level, tmp_path):
    code = "import torch, megatron_sb as sb; x = torch.randn(1, 4, 1, 8); sb.stickbreaking_attention(x, x, x)"
    done = run_code(code, tmp_path, MEGATRON_SB_CPU_LEVEL=level)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("ValueError")
    assert f"MEGATRON_SB_CPU_LEVEL must be avx512, avx2 or baseline, got '{level}'" in message


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [
        ("info", "MEGATRON_SB_CPU_LEVEL", "sse9"),
        ("check", "MEGATRON_SB_WORKSPACE_MIB", "0"),
        ("check", "MEGATRON_SB_KERNELS", "Portable"),
        ("info", "MEGATRON_SB_KERNELS", "hopper"),
    ],
)
def test_the_command_line_reports_an_invalid_variable(command, name, value):
    """The message is one line, and the exit status is that of an invalid argument."""
    done = run_python(["-m", "megatron_sb.cli", command], seconds=300, environment={name: value})
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"megatron-sb: {name} must be ") and value in line


def test_info_names_the_kernels_that_a_variable_disables(tmp_path):
    code = "import json; from megatron_sb import info; print(json.dumps(info.collect()['kernels']))"
    kernels = json.loads(run_code(code, tmp_path, MEGATRON_SB_KERNELS="portable").stdout)
    disabled = {kernel["name"] for kernel in kernels if "disabled by MEGATRON_SB_KERNELS" in kernel["serves"]}
    built = {kernel["name"] for kernel in kernels}
    assert "cpu" in built and disabled == built & {"hopper", "decode"}
