"""Small Megatron-Core models on a CPU: what Megatron-Core 0.16 asks of a GPU or of Transformer Engine, and builders.

For tests only. Dense models with tensor and context parallelism need no shim. Mixture of experts with the allgather
dispatcher needs `answer_for_gpu`; sequence parallelism, which it demands next to tensor parallelism, that and
`TaggedNorm`.
"""

import contextlib
from types import SimpleNamespace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils


def answer_for_gpu() -> None:
    """For the whole process: the router keeps its weights on the CPU and multiplies by torch; no GPU seed is forked."""
    if torch.cuda.is_available():
        raise RuntimeError("answer_for_gpu is for machines without a GPU")
    torch.cuda.current_device = lambda: torch.device("cpu")
    # Imported there only where Transformer Engine is; None is what its absence is meant to be.
    moe_utils.te_general_gemm = None
    # Sequence parallelism draws dropout from a seed of its own, on the GPU, even where the probability is 0.
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


class TaggedNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient the trainer knows to sum over tensor-parallel ranks, for sequence parallelism.

    The torch norm that Megatron-Core falls back to refuses sequence parallelism; its own tagged ones need a GPU.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def small_config(**changes) -> TransformerConfig:
    """Two layers, 4 heads of 8 channels, 2 KV heads, nothing that stick-breaking attention would refuse."""
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            **changes,
        }
    )


def core_attention_arguments(config: TransformerConfig, cp_group=None, **changes) -> dict:
    """The keywords that Megatron-Core's attention builds its core attention with."""
    return {
        "config": config,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "cp_comm_type": None,
        "softmax_scale": config.softmax_scale,
        "pg_collection": SimpleNamespace(tp=None, cp=cp_group),
        **changes,
    }


def packed_params(*offsets: int, **changes) -> PackedSeqParams:
    """Documents that begin and end at these offsets."""
    bounds = torch.tensor(offsets, dtype=torch.int32)
    return PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, **changes})
