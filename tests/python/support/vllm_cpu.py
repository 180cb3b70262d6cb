"""Make vLLM's layers run on CPUs. Import this before them: a wheel for GPUs does not notice that there is no GPU."""

import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
