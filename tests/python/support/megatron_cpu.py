"""Small Megatron-Core models on a CPU: answers for what Megatron-Core asks of a GPU, and builders.

For tests only. Dense models with tensor and context parallelism need no answers. Mixture of experts with the allgather
dispatcher, sequence parallelism, rotary embeddings and distributed checkpoints need `answer_for_gpu`.
"""

import contextlib
from types import SimpleNamespace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_sb.megatron import install_stand_ins


def answer_for_gpu() -> None:
    """For the whole process: the router keeps its weights on the CPU, nothing waits for a GPU, no GPU seed is forked.

    What Transformer Engine would bring has the package's stand-ins.
    """
    if torch.cuda.is_available():
        raise RuntimeError("answer_for_gpu is for machines without a GPU")
    install_stand_ins()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda: None
    # Sequence parallelism draws dropout from a seed of its own, on the GPU, even where the probability is 0.
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    # Recomputation saves and restores the generator of the GPU.
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None


def message(call) -> str:
    """What the ValueError of `call` says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


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
