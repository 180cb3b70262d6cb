"""Run a Megatron training script under the launcher on CPUs, over gloo.

    torchrun megatron_on_cpu.py SCRIPT.py FLAGS..

The flags must contain `--num-workers 0`, because workers of a data loader would look for a GPU.
"""

import sys
from pathlib import Path


def main() -> None:
    """Install the fakes for the GPU, run the launcher, and end the rank."""
    # Replace this file's folder. The script's folder comes first and decides which Megatron is imported.
    sys.path[:1] = [str(Path(sys.argv[1]).resolve().parent), str(Path(__file__).parents[1])]
    from megatron.training import initialize
    from support import megatron_cpu
    from support.launch import end_rank

    from megatron_sb.megatron import launch

    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    megatron_cpu.answer_for_training()
    initialize._warmup_jit_function = lambda *args, **kwargs: None  # it would change the generator of the weights
    # A writer of checkpoints that is forked has the fakes, too.
    start_writer = initialize.init_persistent_async_worker
    initialize.init_persistent_async_worker = lambda rank, method: start_writer(rank, "fork")
    with megatron_cpu.TensorsOnTheCpu():
        launch.main()
    end_rank()


if __name__ == "__main__":
    main()
