"""Small Megatron-Core models on a CPU: fakes for GPU functions that Megatron-Core calls, and builders.

For tests only. Dense models with tensor and context parallelism need no fakes. Mixture of experts with the allgather
dispatcher, sequence parallelism, rotary embeddings and distributed checkpoints need `answer_for_gpu`. The distributed
optimizer also needs `answer_for_streams` and `TensorsOnTheCpu`. Megatron's training scripts also need
`answer_for_training`.
"""

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.inference.contexts import dynamic_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig, attention
from megatron.core.transformer.enums import AttnMaskType
from torch.overrides import TorchFunctionMode

from megatron_sb.megatron import install_stand_ins


def answer_for_gpu() -> None:
    """Fake a GPU in this process: the router's weights stay on the CPU, and GPU synchronisation and seeds do nothing.

    Also installs the package's stand-ins for Transformer Engine.
    """
    if torch.cuda.is_available():
        raise RuntimeError("answer_for_gpu must be called on a machine without a GPU.")
    install_stand_ins()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda: None
    # Sequence parallelism forks a GPU seed for dropout even if the probability is 0.
    random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
    # Recomputation saves and restores the state of the GPU generator.
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **kwargs: None


class NoStream:
    """A fake CUDA stream and event, for work that is never concurrent."""

    def __init__(self, *args, **kwargs) -> None: ...

    def wait_stream(self, other) -> None: ...

    def record_event(self):
        return self

    def record(self, *args) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 1.0


def answer_for_streams() -> None:
    """Fake what dispatchers and the distributed optimizer need: CUDA streams, and all-to-all with sizes as tensors."""
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = NoStream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    exchange = dist.all_to_all_single

    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, group=None):
        sizes = (x.tolist() if isinstance(x, torch.Tensor) else x for x in (output_split_sizes, input_split_sizes))
        return exchange(output, input, *sizes, group=group)

    dist.all_to_all_single = all_to_all_single


class TensorsOnTheCpu(TorchFunctionMode):
    """Create tensors for "cuda" on the CPU. `Tensor.type()` names the type that they would have on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call the function with changed devices."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


class Unpinned(TorchFunctionMode):
    """Create tensors that a GPU would read from pinned memory in ordinary memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Call the function without `pin_memory`."""
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


@contextlib.contextmanager
def answer_for_dynamic_inference() -> Iterator[None]:
    """Fake what a context of dynamic inference needs besides `answer_for_gpu` and `answer_for_streams`.

    That is pinned memory, a Triton kernel that stores keys, for which the context has code in torch, and an installed
    FlashAttention, which no stick-breaking layer calls.
    """
    with (
        mock.patch.object(dynamic_context, "triton_append_key_value_cache", None),
        mock.patch.object(attention, "is_fa_min_version", lambda version: True),
        Unpinned(),
    ):
        yield


def answer_for_training() -> None:
    """Fake the other GPU functions of Megatron's training loop: device properties, generator, memory and NCCL."""
    nothing = {"set_device", "set_rng_state", "manual_seed", "reset_peak_memory_stats", "empty_cache", "set_stream"}
    for name in nothing:
        setattr(torch.cuda, name, lambda *args: None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *args: 0)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    torch.cuda.get_device_capability = lambda *args: (9, 0)
    torch.cuda.get_device_properties = lambda *args: SimpleNamespace(name="none", major=9, minor=0, total_memory=1)
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    torch.cuda.memory_stats = lambda *args: {}
    torch.cuda.is_current_stream_capturing = torch.accelerator.is_available = lambda: False
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None
    init_process_group = dist.init_process_group

    def over_gloo(backend=None, device_id=None, **kwargs) -> None:
        init_process_group("gloo", **kwargs)

    dist.init_process_group = over_gloo
    FileSystemWriterAsync.preload_tensors = staticmethod(copy_tensors)


_preload_tensors = FileSystemWriterAsync.preload_tensors


def copy_tensors(*args, **kwargs) -> list:
    """Copy the tensors of a checkpoint for the process that writes it, as the copy from a GPU to the host does."""
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in _preload_tensors(*args, **kwargs)
    ]


def message(call) -> str:
    """Return the message of the ValueError that `call` raises, or "no error"."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def small_config(kind: type = TransformerConfig, **changes) -> TransformerConfig:
    """Return a config of 2 layers, 4 heads of 8 channels and 2 KV heads that stick-breaking attention supports."""
    return kind(
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


def config_of_virtual_stages(**changes) -> TransformerConfig:
    """Initialise two pipeline ranks with two virtual stages each, and return a config of four layers for them."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, create_gloo_process_groups=False
    )
    return small_config(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        **changes,
    )


def core_attention_arguments(config: TransformerConfig, cp_group=None, **changes) -> dict:
    """Return the arguments with which Megatron-Core's attention builds its core attention."""
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
    """Return Megatron-Core's parameters of packed documents with these offsets."""
    bounds = torch.tensor(offsets, dtype=torch.int32)
    return PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, **changes})
