"""What `megatron-sb info` reports: the build, the devices, the kernels, the optional packages."""

import importlib.metadata
import json
import os
import platform
from typing import Any

import torch

from megatron_sb.ops import library

OPTIONAL_PACKAGES = ("megatron-core", "transformer-engine", "transformers", "matplotlib")
PREFIX_OF_VARIABLES = "MEGATRON_SB_"


def collect() -> dict[str, Any]:
    """Return the facts about this installation and machine that a bug report needs.

    Returns:
        Values that JSON can hold. Memory is in bytes. A version is None if there is no such package or build.

    Raises:
        ImportError: If the library is missing or was built for another torch.

    Example:
        >>> from megatron_sb import info
        >>> info.collect()["kernels"][-1]["name"]
        'decode'
    """
    build = library.build_info()
    return {
        "version": build["version"],
        "library": str(library.library_path()),
        "build": {
            "cuda": build["cuda"],
            "cuda_architectures": [f"sm_{architecture}" for architecture in build["cuda_architectures"]],
            "fast_compile": build["fast_compile"],
            "compiler": build["compiler"],
            "torch": torch.ops.megatron_sb.torch_version(),
            "torch_versions": [*library.libraries()],
        },
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "python": {"version": platform.python_version(), "machine": platform.machine(), "system": platform.platform()},
        "cpu": {
            "instruction_set": torch.ops.megatron_sb.instruction_set(),
            "threads": torch.get_num_threads(),
        },
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)],
        "kernels": [_kernel(line) for line in torch.ops.megatron_sb.describe_kernels().splitlines()],
        "packages": {name: _version(name) for name in OPTIONAL_PACKAGES},
        "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIX_OF_VARIABLES)},
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    return {
        "name": properties.name,
        "capability": f"sm_{capability}",
        "memory_bytes": properties.total_memory,
        "code": code_for(capability, library.build_info()["cuda_architectures"]),
    }


def code_for(capability: int, architectures: list[int]) -> str | None:
    """Return which code of a build a GPU runs.

    Args:
        capability: compute capability of the GPU, times ten: 86 for sm_86.
        architectures: those with machine code, as in `library.build_info`.

    Returns:
        The name of the machine code; "compute_80", the PTX, if the driver must compile it; or None.

    Example:
        >>> code_for(86, [80, 90]), code_for(120, [80, 90]), code_for(75, [80, 90])
        ('sm_80', 'compute_80', None)
    """
    # Machine code runs on GPUs of the same generation, and not on older ones.
    machine_code = [a for a in architectures if a // 10 == capability // 10 and a <= capability]
    if machine_code:
        return f"sm_{max(machine_code)}"
    return "compute_80" if architectures and capability >= 80 else None


def _kernel(line: str) -> dict[str, str]:
    name, _, serves = line.strip().partition(": ")
    return {"name": name, "serves": serves}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _about_code(gpu: dict[str, Any], build: dict[str, Any]) -> str:
    """Return which code the GPU runs, and how to get machine code if it has none."""
    if build["cuda"] is None:
        return ""
    if gpu["code"] is None:
        return ", not supported: the kernels need sm_80 or later"
    if gpu["code"] != "compute_80":
        return f", runs the machine code of {gpu['code']}"
    number = gpu["capability"].removeprefix("sm_")
    return (
        ", no machine code: the driver compiles each kernel at its first call. "
        f"To avoid this, build with SB_CUDA_ARCHITECTURES={number}."
    )


def to_json(facts: dict[str, Any]) -> str:
    """Return the facts of `collect` as indented JSON."""
    return json.dumps(facts, indent=1)


def to_text(facts: dict[str, Any]) -> str:
    """Return the facts of `collect` as lines for people."""
    build, torch_facts, python, cpu = (facts[name] for name in ("build", "torch", "python", "cpu"))
    built = f"CUDA {build['cuda']}, machine code for {', '.join(build['cuda_architectures'])}"
    if build["fast_compile"]:
        built += ". ALL GPU KERNELS BUT HOPPER'S FOR BF16 ARE SLOW. For fast ones, build without SB_FAST_COMPILE."
    if build["cuda"] is None:
        built = "CPU BUILD without GPU kernels. To get them, build with nvcc and a CUDA build of torch."
    versions = ", ".join(build["torch_versions"])
    packages = [f"{name} {version}" for name, version in facts["packages"].items() if version is not None]
    lines = [
        f"megatron_sb   {facts['version']}, {facts['library']}",
        f"build         {built}",
        f"compiler      {build['compiler']}",
        f"torch         {torch_facts['version']} (built with {build['torch']}; libraries for {versions})",
        f"python        {python['version']} on {python['machine']}",
        f"packages      {', '.join(packages) or 'no optional package'}",
        f"cpu           {cpu['instruction_set']}, {cpu['threads']} threads",
    ]
    for index, gpu in enumerate(facts["gpus"]):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        lines.append(f"cuda:{index}        {gpu['name']}, {gpu['capability']}, {memory}{_about_code(gpu, build)}")
    lines += [] if facts["gpus"] else ["cuda          no device"]
    lines += [f"{name} = {value}" for name, value in facts["environment"].items()]
    lines += ["kernels, fastest first", *(f"  {kernel['name']}: {kernel['serves']}" for kernel in facts["kernels"])]
    return "\n".join(lines)
