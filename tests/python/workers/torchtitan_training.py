"""Train the model of examples/torchtitan with torchtitan's trainer, and write what it logs as JSON.

Runs in one process: `torchtitan_training.py OUT.json FOLDER DEVICE`. It imports torchtitan, which takes many seconds,
and then forks the ranks of each run. With DEVICE cpu, FOLDER/seed gets the weights that all runs start from. With
DEVICE cuda, this process trains from these weights on a GPU. torchrun must have started it.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples/torchtitan"))
if sys.argv[3] == "cpu":
    import train_on_cpu  # noqa: F401  # before torchtitan's trainer
from stickbreaking_llama import FLAVORS, model_config, model_registry
from support.launch import end_worker, rank_environments
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

OUT, FOLDER, DEVICE = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
CONTEXT, TENSOR = "--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"
NOT_BALANCED = "--parallelism.context_parallel_load_balancer=None"
# Number of ranks and options by name. Ranks that neither option counts have sequences of their own.
RUNS = {
    "one rank": (1, []),
    "context": (2, [CONTEXT]),
    "context, contiguous": (2, [CONTEXT, NOT_BALANCED]),
    "tensor": (2, [TENSOR]),
    "context, tensor": (4, [CONTEXT, TENSOR]),
    "two batches": (2, []),
    "two batches, context": (4, [CONTEXT]),
}
REFUSED = (
    "--parallelism.spmd_backend=full_dtensor",
    "--parallelism.context_parallel_load_balancer=ptrr",
    "--debug.spmd_typechecking",
    f"--compile.enable {CONTEXT}",
)
SECONDS = 200  # for one run


def config_of(*options: str) -> Trainer.Config:
    """Return torchtitan's configuration of the example's run with more options."""
    arguments = ["--module=stickbreaking_llama", "--config=debugmodel", "--checkpoint.enable", *options]
    return ConfigManager().parse_args(arguments)


def message_of(options: str) -> str | None:
    """Return the message of the error if the model refuses options, which a space separates."""
    config = config_of(*options.split())
    try:
        config.model_spec.model.update_from_config(config=config)
    except ValueError as error:
        return str(error)
    return None


def message_of_size(dim: int) -> str | None:
    """Return the message of the error if there is no model with so many channels between its layers."""
    try:
        model_config(**FLAVORS["debugmodel"] | {"dim": dim})
    except ValueError as error:
        return str(error)
    return None


def save_seed(folder: Path, out: str, options: list[str]) -> None:
    """Save initial weights to FOLDER/seed, as torchtitan does for runs with different layouts."""
    trainer = config_of(f"--dump_folder={folder}/seed", "--checkpoint.create_seed_checkpoint").build()
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()
    end_worker(out, {})


def train(folder: Path, out: str, options: list[str]) -> None:
    """Train for 20 steps from FOLDER/seed. Write the loss and the norm of the gradient of each step."""
    config = config_of(
        f"--dump_folder={folder}",
        f"--checkpoint.initial_load_path={folder}/seed/checkpoint/step-0",
        "--checkpoint.load_only",
        *options,
    )
    trainer = config.build()
    logged = {"loss": [], "grad_norm": []}

    def log(step: int, loss: float, max_loss: float, grad_norm: float, extra_metrics: dict) -> None:
        logged["loss"].append(loss)
        logged["grad_norm"].append(grad_norm)

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()
    end_worker(out, logged)


def run_rank(variables: dict[str, str], function: Callable, *arguments) -> None:
    """Call a function in a fork of this process that is a rank."""
    os.environ.update(variables)
    # The first call of a fork makes its pool of threads. Else the threads of autograd would, all at once: torch 2.15
    # then aborts at times with "Invalid thread pool!".
    torch.set_num_threads(1)
    function(*arguments)


def on_ranks(num_ranks: int, function: Callable, folder: Path, options: list[str]) -> dict:
    """Run `train` or `save_seed` on forks of this process. Return what rank 0 writes."""
    out = folder / "rank0.json"
    context = multiprocessing.get_context("fork")
    with rank_environments(num_ranks, SECONDS) as variables:
        ranks = [context.Process(target=run_rank, args=(own, function, folder, str(out), options)) for own in variables]
        for rank in ranks:
            rank.start()
        end = time.monotonic() + SECONDS
        for rank in ranks:
            rank.join(max(0, end - time.monotonic()))
        states = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
    if any(state != 0 for state in states):
        raise RuntimeError(f"{function.__name__} {options} must end with 0 on all ranks, got {states}.")
    return json.loads(out.read_text())


def error_of_packing() -> float:
    """Return how far the logits of packed documents are from those of each document alone, relative to the largest."""
    model = model_registry("debugmodel").model.build().double()
    with torch.no_grad():
        model.init_states()
        lengths = ((20, 1, 43), (64,))  # of the documents in each row
        tokens = torch.randint(0, 256, (2, 64))
        positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
        packed = model(tokens, positions)
        rows = [
            torch.cat([model(document[None])[0] for document in row.split(sizes)])
            for row, sizes in zip(tokens, lengths, strict=True)
        ]
    return float((packed - torch.stack(rows)).abs().max() / packed.abs().max())


def find_on_cpus() -> dict:
    """Save the weights that runs start from, and return what the tests compare."""
    on_ranks(1, save_seed, FOLDER, [])
    findings = {name: on_ranks(ranks, train, FOLDER, options) for name, (ranks, options) in RUNS.items()}
    findings["packing"] = error_of_packing()
    findings["refused"] = {options: message_of(options) for options in REFUSED}
    findings["refused sizes"] = [message_of_size(dim) for dim in (60, 66, 2048)]
    return findings


if __name__ == "__main__":
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        OUT.write_text(json.dumps(find_on_cpus()))
    else:
        train(FOLDER, str(OUT), [])
