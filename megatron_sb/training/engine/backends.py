"""Gradients, optimizer and checkpoints: by torch on a CPU, by Megatron-Core on GPUs.

Megatron-Core's DistributedDataParallel, distributed optimizer and distributed checkpoints need CUDA. Both classes below
have the same methods, so the engine is the same code on both devices. In both, the loss is a rank's share of the global
mean, and the gradient is the gradient of that mean.
"""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megatron_sb.megatron.metadata import load_state, read_metadata, weights_only
from megatron_sb.megatron.shards import PREFIXES
from megatron_sb.megatron.weights import has_optimizer
from megatron_sb.training.config import OptimizerConfig
from megatron_sb.validation import InputError

_RESHARDABLE = "fully_reshardable"  # Megatron-Core's name of the format that any parallel layout can load


class TorchBackend:
    """torch's DistributedDataParallel, AdamW and distributed checkpoint.

    Each rank saves its own shard if tensor or expert parallelism splits the model. Such a checkpoint can be loaded only
    with the same parallel sizes.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        reduce_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        experts = {name for name, parameter in model.named_parameters() if _is_expert(parameter)}
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        self._ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=reduce_group)
        self._ddp.register_comm_hook(reduce_group, _sum_in_rank_order)
        self._clip_grad = config.clip_grad
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        vectors = [parameter for parameter in self._trained if parameter.ndim == 1]
        matrices = [parameter for parameter in self._trained if parameter.ndim != 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]  # torch does not restore an empty group
        self._optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps)

    def forward(self, *args, **kwargs) -> Tensor:
        """Run the wrapped model's forward."""
        return self._ddp(*args, **kwargs)

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of a micro-batch's forward and backward. The last micro-batch reduces the gradients."""
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def step(self, learning_rate: float) -> float:
        """Reduce the remaining gradients, clip, update and clear them. Return the norm before clipping."""
        _reduce_model_parallel_gradients(self._trained)
        norm = _gradient_norm(self._trained)
        torch.nn.utils.clip_grads_with_norm_(self._trained, self._clip_grad, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def save(self, path: Path) -> None:
        """Write model and optimizer. Collective."""
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path, *, with_optimizer: bool = True) -> None:
        """Read what `save` wrote. Collective. Code in the files is not executed.

        Args:
            path: folder of the checkpoint.
            with_optimizer: false leaves the optimizer as it is. Default True.

        Raises:
            ValueError: The checkpoint was saved with other parallel sizes, or on GPUs. Or `.metadata` cannot be read
                safely.
        """
        if not with_optimizer:
            self.load_weights(self._ddp.module, path)
            return
        state = self._state()
        _load_state_of_cpus(state, path)
        set_optimizer_state_dict(self._ddp, self._optimizer, optim_state_dict=state[f"optimizer{_shard_suffix()}"])

    @staticmethod
    def load_weights(model: torch.nn.Module, path: Path) -> None:
        """Read the weights of a model that has no optimizer. Collective. For the errors, see `load`."""
        _load_state_of_cpus({f"model{_shard_suffix()}": _tensors(model)}, path)

    def _state(self) -> dict:
        return {
            f"model{_shard_suffix()}": _tensors(self._ddp.module),
            f"optimizer{_shard_suffix()}": get_optimizer_state_dict(self._ddp, self._optimizer),
        }


class MegatronBackend:
    """Megatron-Core's DistributedDataParallel, distributed optimizer and distributed checkpoint."""

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        from megatron.core import distributed, optimizer

        ddp_config = distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        self._ddp = distributed.DistributedDataParallel(model.config, ddp_config, model)
        self._finalize = distributed.finalize_model_grads
        self._weight_decay = config.weight_decay
        self._steps = 0
        optimizer_config = optimizer.OptimizerConfig(
            optimizer="adam",
            lr=0.0,  # set before every step
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=model.config.bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        )
        self._optimizer = optimizer.get_megatron_optimizer(optimizer_config, [self._ddp], use_gloo_process_groups=False)
        self._ddp.zero_grad_buffer()

    def forward(self, *args, **kwargs) -> Tensor:
        """Run the wrapped model's forward."""
        return self._ddp(*args, **kwargs)

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager:
        """Return the context of a micro-batch's forward and backward. The last micro-batch reduces the gradients."""
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def step(self, learning_rate: float) -> float:
        """Reduce the remaining gradients, clip, update and clear them. Return the norm before clipping."""
        self._finalize([self._ddp])
        norm = self._update(learning_rate)
        self._steps += 1
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        return norm

    def _update(self, learning_rate: float) -> float:
        for group in self._optimizer.param_groups:  # in Megatron's own loop its scheduler sets both
            group["lr"] = learning_rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def save(self, path: Path) -> None:
        """Write model and optimizer in the format that any parallel layout can load. Collective."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded_state(is_loading=False), str(path))

    @torch.no_grad()
    def load(self, path: Path, *, with_optimizer: bool = True) -> None:
        """Read what `save` wrote. Collective. A checkpoint without an optimizer leaves the optimizer as it is.

        Code in the files is not executed: `has_optimizer` reads the metadata safely before Megatron-Core does.

        Args:
            path: folder of the checkpoint.
            with_optimizer: false leaves the optimizer as it is, too. Default True.

        Raises:
            ValueError: `.metadata` cannot be read safely, or the checkpoint was saved on CPUs.
        """
        if not has_optimizer(path) or not with_optimizer:
            self.load_weights(self._ddp.module, path)
            self._optimizer.reload_model_params()
            return
        state = _read(self._sharded_state(is_loading=True), path)
        self._ddp.module.load_state_dict(state["model"])
        self._steps = state["steps"]
        optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for index, optimizer in enumerate(optimizers):
            found = state["optimizer"] if len(optimizers) == 1 else state["optimizer"][index]
            # Load tensors only. Experts that expert parallelism splits have their own optimizer. The layout that saved
            # the checkpoint may therefore have had several optimizers, and this layout one.
            tensors = {"param_state": found["param_state"], "param_state_sharding_type": _RESHARDABLE}
            own = optimizer.state_dict()
            for group in own["optimizer"]["param_groups"]:
                group["step"] = self._steps
            optimizer.load_state_dict({**own, **tensors})

    @staticmethod
    @torch.no_grad()
    def load_weights(model: torch.nn.Module, path: Path) -> None:
        """Read the weights of a model that has no optimizer. Collective. For the errors, see `load`."""
        read_metadata(path)  # safely, before Megatron-Core reads it
        model.load_state_dict(_read({"model": model.sharded_state_dict()}, path)["model"])

    def _sharded_state(self, *, is_loading: bool) -> dict:
        model = self._ddp.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": _RESHARDABLE, "chained_optim_avoid_prefix": True}
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "steps": self._steps}


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights of a model without Megatron's extra states, which are None."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _load_state_of_cpus(state: dict, path: Path) -> None:
    """Read the entries of `state` from a checkpoint of `TorchBackend`, tensors in place. Collective.

    The tensors of a model are the parameters themselves. For the errors, see `TorchBackend.load`.
    """
    saved = read_metadata(path).state_dict_metadata
    if not any(name.startswith(PREFIXES) for name in saved):
        raise InputError(
            f"{path} was saved on GPUs, or converted for Megatron-Core. On CPUs a checkpoint can be loaded only if it "
            "was saved on CPUs. Use the device cuda (parallel.device=cuda)."
        )
    if not any(name.startswith(f"model{_shard_suffix()}.") for name in saved):
        raise InputError(
            f"{path} was saved with another parallel.tensor_parallel_size or parallel.expert_parallel_size. On CPUs a "
            "checkpoint can be loaded only with the two sizes that it was saved with."
        )
    load_state(state, path)


def _read(state: dict, path: Path) -> dict:
    """Return the entries of a sharded state from a checkpoint of Megatron-Core. Collective.

    Raises:
        ValueError: `TorchBackend` saved the checkpoint.
    """
    from megatron.core import dist_checkpointing

    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise InputError(
            f"{path} was saved on CPUs. On GPUs a checkpoint can be loaded only if it was saved on GPUs or converted "
            "for Megatron-Core. Use the device cpu (parallel.device=cpu)."
        )
    with weights_only():
        return dist_checkpointing.load(state, str(path))


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether expert-parallel ranks hold different parameters."""
    return not getattr(parameter, "allreduce", True)


def _reduce_model_parallel_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Sum the gradients that the data-parallel reduction does not sum.

    Gradients of experts are summed over the replicas of the expert. With sequence parallelism, gradients of norms and
    routers are summed over the tensor-parallel ranks that share a sequence. An expert that received no token gets a
    gradient of zeros.
    """
    for parameter in parameters:
        if _is_expert(parameter):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=parallel_state.get_expert_data_parallel_group())
        elif getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def _gradient_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Return the norm of the whole model's gradient.

    Several ranks hold the same parameters, so each rank divides its squares by the number of these ranks.
    """
    ranks = dist.get_world_size()
    squares = torch.zeros((), dtype=torch.float64)
    for held, copies in (
        (_is_expert, ranks / parallel_state.get_expert_model_parallel_world_size()),
        (_is_shard, ranks / parallel_state.get_tensor_model_parallel_world_size()),
        (lambda parameter: not _is_expert(parameter) and not _is_shard(parameter), ranks),
    ):
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if held(parameter)])
        squares += norm.double() ** 2 / copies
    dist.all_reduce(squares)
    return squares.sqrt().float()


def _is_shard(parameter: torch.nn.Parameter) -> bool:
    """Whether tensor-parallel ranks hold different shards."""
    return getattr(parameter, "tensor_model_parallel", False) and not _is_expert(parameter)


def _shard_suffix() -> str:
    """Return a suffix for this rank's shard of the model; empty where no parallelism splits the model."""
    tensor, expert = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    )
    if tensor.size() == expert.size() == 1:
        return ""
    return f"_tensor{tensor.rank()}of{tensor.size()}_expert{expert.rank()}of{expert.size()}"


def _sum_in_rank_order(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum gradients over ranks in the order of the ranks.

    The order of an all-reduce depends on a gradient's place in its bucket, and torch rebuilds the buckets after the
    first step. With more than two ranks, a resumed run would differ in the last bits.
    """
    ranks = dist.get_world_size(group)
    gathered = bucket.buffer().new_empty(ranks * bucket.buffer().numel())
    work = dist.all_gather_into_tensor(gathered, bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda _: gathered.view(ranks, -1).sum(dim=0))
