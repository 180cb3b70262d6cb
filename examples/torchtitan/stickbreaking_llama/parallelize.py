"""Distribute the model over ranks: torchtitan's function for Llama, with a setting that gloo needs."""

from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import parallelize_llama

from .model import StickBreakingModel


def parallelize(model: StickBreakingModel, *, parallel_dims: ParallelDims, **settings) -> StickBreakingModel:
    """Return the model with tensor parallelism, activation checkpointing and FSDP2, as the configuration says.

    Args:
        model: the model, on the meta device.
        parallel_dims: the device meshes.
        settings: see `parallelize_llama`.
    """
    model = parallelize_llama(model, parallel_dims=parallel_dims, **settings)
    if parallel_dims.world_mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # FSDP2 would ask gloo for a sum with a factor, which only NCCL has.
                module.set_force_sum_reduction_for_comms(True)
    return model
