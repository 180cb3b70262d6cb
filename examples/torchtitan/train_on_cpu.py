"""Train on CPUs over gloo with torchtitan's trainer, which otherwise asks for a GPU. Two ranks share each sequence:

torchrun --nproc-per-node 4 examples/torchtitan/train_on_cpu.py --module stickbreaking_llama --config debugmodel \
    --parallelism.context_parallel_degree 2
"""

import types

import torch
from torchtitan.tools import utils


class CpuModule(types.ModuleType):
    """What torchtitan uses of `torch.cuda`, for CPUs. It reports no memory."""

    def __init__(self) -> None:
        super().__init__("cpu")

    device_count = staticmethod(torch.cpu.device_count)
    set_device = staticmethod(torch.cpu.set_device)
    synchronize = staticmethod(torch.cpu.synchronize)

    def current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_device_name(self, device: torch.device) -> str:
        """Return a name without a known peak rate."""
        return "CPU"

    def get_device_properties(self, device: torch.device) -> types.SimpleNamespace:
        """Return a capacity that torchtitan can divide by."""
        return types.SimpleNamespace(total_memory=2**30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Return no statistics."""
        return {}

    def reset_peak_memory_stats(self) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""


# Other modules of torchtitan copy both names when they are imported. So this comes before any other import of it.
utils.device_type, utils.device_module = "cpu", CpuModule()

if __name__ == "__main__":
    from torchtitan.train import main

    main()
