"""Save and load checkpoints of Megatron's distributed optimizer on CPU ranks, as Megatron's training loop does.

Runs on 2 data-parallel ranks: `megatron_checkpoints.py OUT.json`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_sb.megatron import with_stickbreaking
from megatron_sb.megatron.settings import MARKER

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from support.launch import end_worker, new_folder

VOCABULARY, LENGTH = 32, 16
FORMATS = ("fully_reshardable", "dp_reshardable")
BUCKETS = {"one bucket": None, "several buckets": 2048}  # parameters of a bucket


def build_model(*, stick_breaking: bool = True, **options) -> GPTModel:
    """Build a small model in bf16. All ranks and calls make the same weights."""
    torch.manual_seed(1)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(
        megatron_cpu.small_config(bf16=True, params_dtype=torch.bfloat16, gradient_accumulation_fusion=False),
        with_stickbreaking(spec, **options) if stick_breaking else spec,
        VOCABULARY,
        LENGTH,
        position_embedding_type="none",
    )
    return model.bfloat16()  # norms too, as in Megatron's loop


class Training:
    """A model with Megatron's distributed optimizer around torch's AdamW.

    bucket_size: parameters after which a bucket of gradients ends; None: there is one bucket.
    """

    def __init__(self, bucket_size: int | None = None) -> None:
        model = build_model()
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=bucket_size is not None,
            bucket_size=bucket_size,
        )
        self.ddp = DistributedDataParallel(model.config, ddp_config, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(config, [self.ddp], use_gloo_process_groups=False)
        self.adam = self.optimizer.chained_optimizers[0].optimizer

    def train(self, first: int, last: int) -> None:
        """Make steps first to last - 1. The tokens depend on the step and the rank."""
        for step in range(first, last):
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
            self.ddp(tokens, None, None, labels=tokens.roll(-1, 1)).mean().backward()
            finalize_model_grads([self.ddp])
            self.optimizer.step()

    def state(self, kind: str, *, is_loading: bool) -> dict:
        """Return the sharded state of model and optimizer. kind: the format of the optimizer."""
        metadata = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        model = self.ddp.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def load(self, folder: Path, kind: str) -> None:
        """Load what was saved from `state`."""
        state = dist_checkpointing.load(self.state(kind, is_loading=True), str(folder))
        self.ddp.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def buckets(self) -> list:
        """Return the buckets of gradients."""
        return [bucket for buffer in self.ddp.buffers for bucket in buffer.buckets]

    def step_counts(self) -> list[float]:
        """Return the step count of each parameter on this rank."""
        return [state["step"].item() for state in self.adam.state.values()]

    def difference(self, other: "Training") -> float:
        """Return the largest difference of a parameter from another training's."""
        pairs = zip(self.ddp.parameters(), other.ddp.parameters(), strict=True)
        return torch.stack([(a.float() - b.float()).abs().max() for a, b in pairs]).max().item()


def resumed(folder: Path, kind: str, bucket_size: int | None = None) -> dict:
    """Interrupt a training after 3 of 6 steps. Return how its parameters and step counts differ from one in a piece."""
    whole, begun, resumed = (Training(bucket_size) for _ in range(3))
    whole.train(0, 6)
    begun.train(0, 3)
    dist_checkpointing.save(begun.state(kind, is_loading=False), str(folder))
    resumed.load(folder, kind)
    loaded = sorted({*resumed.step_counts()})
    resumed.train(3, 6)
    return {
        "steps": [loaded, sorted({*resumed.step_counts()})],
        "difference": resumed.difference(whole),
        "difference from the interrupted training": resumed.difference(begun),
        "padding": [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in begun.buckets()],
    }


def state_before_the_first_step() -> dict:
    """Read the state of an optimizer that has made no step. Return what this changed."""
    fresh, read = Training(), Training()
    read.optimizer.state_dict()
    same = [group == other for group, other in zip(_settings(fresh), _settings(read), strict=True)]
    gradients = [parameter.grad for group in read.adam.param_groups for parameter in group["params"]]
    fresh.train(0, 2)
    read.train(0, 2)
    return {
        "same settings": all(same),
        "gradients": sum(gradient is not None for gradient in gradients),
        "difference": fresh.difference(read),
    }


def _settings(training: Training) -> list[dict]:
    return [{name: x for name, x in group.items() if name != "params"} for group in training.adam.param_groups]


def marked_checkpoints(folder: Path) -> dict:
    """Save a model with and without the marker, and load both strictly. Return the messages of errors."""
    models = {"stick-breaking": build_model(), "softmax": build_model(stick_breaking=False)}
    found = {}
    for saved, metadata in (("marked", {MARKER: True}), ("not marked", {})):
        path = new_folder(folder / saved.replace(" ", "-"))
        dist_checkpointing.save(models["stick-breaking"].sharded_state_dict(metadata=dict(metadata)), str(path))
        for name, model in models.items():
            state = model.sharded_state_dict(metadata=dict(metadata))  # Megatron loads it from the checkpoint
            try:
                model.load_state_dict(dist_checkpointing.load(state, str(path), strict="raise_all"))
                found[f"{saved}, {name}"] = "no error"
            except CheckpointingException as error:
                found[f"{saved}, {name}"] = str(error)
    return found


def main(out: str) -> None:
    """Write all findings."""
    torch.set_num_threads(1)
    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    folder = Path(out).parent
    with megatron_cpu.TensorsOnTheCpu():
        found = {"marked": marked_checkpoints(folder), "before the first step": state_before_the_first_step()}
        found["resumed"] = {
            f"{kind}, {name}": resumed(new_folder(folder / f"{kind}-{size}"), kind, size)
            for kind in FORMATS
            for name, size in BUCKETS.items()
        }
    end_worker(out, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
