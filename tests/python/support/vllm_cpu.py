"""Make vLLM run on CPUs. Import this before its layers: a wheel for GPUs does not notice that there is no GPU.

Such a wheel has no compiled functions for CPUs. `define_functions` defines those that the engine calls.
"""

import os

import torch

os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # "" would tell vLLM that Triton works
import vllm.platforms
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

# Of the model of this project that the tests run.
SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def _write_slots(starts: Tensor, positions: Tensor, block_table: Tensor, slots: Tensor, block_size: int) -> None:
    """Write the place in the cache of each token: starts (requests + 1,), block_table (requests, blocks)."""
    for request, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        position = positions[begin:end]
        slots[begin:end] = block_table[request, position // block_size] * block_size + position % block_size
    slots[int(starts[-1]) :] = -1


# Schemas of functions in torch.ops._C, and what computes them.
_FUNCTIONS = {
    "init_cpu_memory_env(int[] nodes) -> str": lambda nodes: "",
    "compute_slot_mapping_kernel_impl(Tensor a, Tensor b, Tensor c, Tensor(a!) slots, int size) -> ()": _write_slots,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
}


def define_functions() -> torch.library.Library:
    """Define the functions, as long as the result lives."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _FUNCTIONS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    return library
