"""Save the distributed optimizer of a model with several buckets of gradients in the format "fully_reshardable".

Megatron-Core before 0.20 saves wrong numbers there, without an error
(https://github.com/NVIDIA/Megatron-LM/pull/5077). It pads the end of each bucket, gathers the states of all buckets
without this padding, and then looks for a parameter where it is with the padding. So all parameters after a padded
bucket get the numbers of their neighbours. A run that loads such a checkpoint continues with these wrong fp32 weights.

A model has several buckets if reductions overlap (`--overlap-grad-reduce`) and it has more parameters than
`--ddp-bucket-size`, 40 million by default. `index_without_padding` mends this. `stand_ins.install_stand_ins` calls it.
"""

from __future__ import annotations

import functools

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_sb.megatron.versions import INDEXES_WITHOUT_PADDING


def index_without_padding() -> None:
    """Let the distributed optimizer find parameters where they are. Call this function once.

    It has no effect on a Megatron-Core that finds them by itself.
    """
    if INDEXES_WITHOUT_PADDING:
        return
    stock = DistributedOptimizer.sharded_param_state_fully_reshardable

    @functools.wraps(stock)
    def sharded_param_state(self, *args, **kwargs):
        padded = [buffer.param_index_map for buffer in self.buffers]
        try:
            for buffer in self.buffers:
                buffer.param_index_map = _places_without_padding(buffer)
            return stock(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded_param_state


def _places_without_padding(buffer) -> dict[torch.nn.Parameter, tuple[int, int, int]]:
    """Return (begin, end, bucket) of each parameter in the states of all buckets without their padding."""
    removed = [0]  # padding of all buckets before a bucket
    for bucket in buffer.buckets:
        removed.append(removed[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    return {
        parameter: (begin - removed[bucket], end - removed[bucket], bucket)
        for parameter, (begin, end, bucket) in buffer.param_index_map.items()
    }
