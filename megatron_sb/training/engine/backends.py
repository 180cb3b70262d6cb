"""The seam between machines: gradients, optimizer and checkpoints by torch on a CPU, by Megatron-Core on GPUs.

Megatron-Core has its DistributedDataParallel, distributed optimizer and distributed checkpoints for CUDA alone. Both
classes below offer the same few methods, so that everything above them is the same code on either machine. In both, a
loss that is a rank's share of the global mean gives the gradient of that mean.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megatron_sb.megatron.weights import has_optimizer
from megatron_sb.training.config import OptimizerConfig

_RESHARDABLE = "fully_reshardable"  # by Megatron-Core's name: any parallel layout loads it


class TorchBackend:
    """torch's DistributedDataParallel, AdamW and distributed checkpoint.

    Every rank saves its own share of a model that tensor or expert parallelism splits: only the same sizes load it.
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        reduce_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        experts = {name for name, parameter in model.named_parameters() if _is_expert(parameter)}
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
        self._ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=reduce_group)
        self._ddp.register_comm_hook(reduce_group, _sum_in_rank_order)
        self._clip_grad = config.clip_grad
        vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        matrices = [parameter for parameter in model.parameters() if parameter.ndim != 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps)

    def forward(self, *args, **kwargs) -> Tensor:
        """The wrapped model's forward."""
        return self._ddp(*args, **kwargs)

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of one micro-batch: gradients are reduced with the last."""
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def step(self, learning_rate: float) -> float:
        """Reduce what is left, clip, update, clear. Returns the norm of the gradient before clipping."""
        parameters = list(self._ddp.parameters())
        _reduce_model_parallel_gradients(parameters)
        norm = _gradient_norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_grad, norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def save(self, path: Path) -> None:
        """Model and optimizer; collective."""
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        """The inverse of save; collective. Raises ValueError where the model was split otherwise, or saved on GPUs."""
        state = self._state()
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        if not any(name.startswith(f"model{_share()}.") for name in saved):
            raise ValueError(
                f"{path} was saved with another parallel.tensor_parallel_size or parallel.expert_parallel_size, or on "
                "GPUs: a CPU loads what CPUs saved with the same (on GPUs Megatron's checkpoints load on any)"
            )
        dcp.load(state, checkpoint_id=path)  # in place: the model's tensors are the parameters themselves
        set_optimizer_state_dict(self._ddp, self._optimizer, optim_state_dict=state[f"optimizer{_share()}"])

    def _state(self) -> dict:
        tensors = {
            name: value for name, value in self._ddp.module.state_dict().items() if isinstance(value, Tensor)
        }  # Megatron's extra states are None
        return {
            f"model{_share()}": tensors,
            f"optimizer{_share()}": get_optimizer_state_dict(self._ddp, self._optimizer),
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
        """The wrapped model's forward."""
        return self._ddp(*args, **kwargs)

    def accumulate(self, *, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of one micro-batch: gradients are reduced with the last."""
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def step(self, learning_rate: float) -> float:
        """Reduce what is left, clip, update, clear. Returns the norm of the gradient before clipping."""
        self._finalize([self._ddp])
        norm = self._update(learning_rate)
        self._steps += 1
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        return norm

    def _update(self, learning_rate: float) -> float:
        for group in self._optimizer.param_groups:  # what Megatron's scheduler would set
            group["lr"] = learning_rate * group["lr_mult"]
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        _, norm, _ = self._optimizer.step()
        return float(norm)

    def save(self, path: Path) -> None:
        """Model and optimizer, in the form that any parallel layout loads; collective."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded_state(is_loading=False), str(path))

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """The inverse of save; collective. A checkpoint of weights alone leaves the optimizer as new."""
        from megatron.core import dist_checkpointing

        if not has_optimizer(path):
            state = dist_checkpointing.load({"model": self._ddp.module.sharded_state_dict()}, str(path))
            self._ddp.module.load_state_dict(state["model"])
            self._optimizer.reload_model_params()
            return
        # Without Transformer Engine and Apex it is torch's AdamW, without a state to load into before a step.
        self._update(0.0)
        state = dist_checkpointing.load(self._sharded_state(is_loading=True), str(path))
        self._ddp.module.load_state_dict(state["model"])
        self._steps = state["steps"]
        optimizers = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        for index, optimizer in enumerate(optimizers):
            found = state["optimizer"] if len(optimizers) == 1 else state["optimizer"][index]
            # What is no tensor is this optimizer's own: the experts that expert parallelism splits have an optimizer to
            # themselves, so the saved one may have been several where this is one.
            tensors = {"param_state": found["param_state"], "param_state_sharding_type": _RESHARDABLE}
            with _step_counts_given(self._steps):
                optimizer.load_state_dict({**optimizer.state_dict(), **tensors})
            for of_parameter in optimizer.optimizer.state.values():
                if "step" in of_parameter:  # one tensor, which all parameters would count in
                    of_parameter["step"] = torch.tensor(float(self._steps))

    def _sharded_state(self, *, is_loading: bool) -> dict:
        model = self._ddp.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": _RESHARDABLE, "chained_optim_avoid_prefix": True}
        optimizer = self._optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer, "steps": self._steps}


@contextlib.contextmanager
def _step_counts_given(steps: int) -> Iterator[None]:
    """Around loading the distributed optimizer: Megatron-Core (0.16, 0.19) asks for the step count that torch's AdamW
    has for every parameter, but does not load it.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    stock = DistributedOptimizer._set_main_param_and_optimizer_states

    def load_one(optimizer: DistributedOptimizer, parameter: torch.nn.Parameter, found: dict) -> None:
        stock(optimizer, parameter, {"step": torch.tensor(float(steps)), **found})

    DistributedOptimizer._set_main_param_and_optimizer_states = load_one
    try:
        yield
    finally:
        DistributedOptimizer._set_main_param_and_optimizer_states = stock


def _is_expert(parameter: torch.nn.Parameter) -> bool:
    """Whether expert-parallel ranks have different ones."""
    return not getattr(parameter, "allreduce", True)


def _reduce_model_parallel_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Add up what data-parallel reduction leaves: experts' over their own replicas, norms' and routers' over the
    tensor-parallel ranks that share a sequence. An expert that no token was sent to has a gradient of zeros.
    """
    for parameter in parameters:
        if _is_expert(parameter):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad, group=parallel_state.get_expert_data_parallel_group())
        elif getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def _gradient_norm(parameters: list[torch.nn.Parameter]) -> Tensor:
    """Of the whole model: every rank gives the squares of what it holds, divided by how many ranks hold the same."""
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
    """Whether tensor-parallel ranks have different parts."""
    return getattr(parameter, "tensor_model_parallel", False) and not _is_expert(parameter)


def _share() -> str:
    """Names this rank's share of the model among tensor- and expert-parallel ranks; empty where there is one share."""
    tensor, expert = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_expert_model_parallel_group(),
    )
    if tensor.size() == expert.size() == 1:
        return ""
    return f"_tensor{tensor.rank()}of{tensor.size()}_expert{expert.rank()}of{expert.size()}"


def _sum_in_rank_order(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients added up over ranks, always in the order of the ranks.

    An all-reduce adds in an order that depends on a gradient's place in its bucket, and the buckets are laid out anew
    after the first step: with more than two ranks a resumed run would differ in the last bits.
    """
    ranks = dist.get_world_size(group)
    gathered = bucket.buffer().new_empty(ranks * bucket.buffer().numel())
    work = dist.all_gather_into_tensor(gathered, bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda _: gathered.view(ranks, -1).sum(dim=0))
