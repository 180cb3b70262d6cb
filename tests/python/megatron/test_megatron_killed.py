"""Megatron's training loop: a job that is killed while it saves resumes from its newest checkpoint in another layout.

The runs are in fp32, so that all layouts have the same losses.
"""

import pytest
from support.jobs import kill_while
from support.megatron_loop import FP32, is_saving_another, needs_training, newest, started_training, train

STEPS, INTERVAL = 12, 2
MODEL = f"--use-cpu-initialization --calculate-per-token-loss --sb-remainder-bias --train-iters {STEPS}".split()
DISTRIBUTED = "--use-distributed-optimizer"
RESHARDABLE = f"{DISTRIBUTED} --dist-ckpt-optim-fully-reshardable"
ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
CONTEXT, TENSOR = "--context-parallel-size 2", "--tensor-model-parallel-size 2"
# The ranks and the layout of the job that is killed, and of the job that resumes. The distributed optimizer can resume
# with other tensor-parallel sizes only if it is fully reshardable.
CASES = {
    "plain": ("", (2, CONTEXT), (2, TENSOR)),
    "plain, async": (ASYNC, (2, TENSOR), (1, "")),
    "distributed": (DISTRIBUTED, (2, CONTEXT), (1, "")),
    "distributed, async": (f"{DISTRIBUTED} {ASYNC}", (2, ""), (2, CONTEXT)),
    "fully reshardable": (RESHARDABLE, (2, TENSOR), (2, CONTEXT)),
    "fully reshardable, async": (f"{RESHARDABLE} {ASYNC}", (2, CONTEXT), (2, TENSOR)),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """The losses of one rank that never stops."""
    losses = train("cpu", 1, tmp_path_factory.mktemp("whole"), *MODEL, model=FP32)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1.0
    return losses


@needs_training
@pytest.mark.parametrize(("flags", "first", "second"), CASES.values(), ids=CASES)
def test_a_killed_job_resumes_in_another_layout(flags, first, second, expected, tmp_path):
    """The second job has the losses of a job that never stopped, and completes the checkpoint that was begun.

    After a resume, the second loss that Megatron logs is the mean of both.
    """
    saved = tmp_path / "saved"
    save = ["--save", str(saved), "--save-interval", str(INTERVAL)]
    (ranks, layout), (other_ranks, other_layout) = first, second
    with started_training(ranks, tmp_path, *MODEL, *flags.split(), *layout.split(), *save, model=FP32) as processes:
        kill_while(processes, lambda: is_saving_another(saved))
    step = newest(saved)
    assert step % INTERVAL == 0 and is_saving_another(saved)

    flags = [*flags.split(), *other_layout.split(), *save, "--load", str(saved)]
    losses = train("cpu", other_ranks, tmp_path, *MODEL, *flags, model=FP32)
    whole = expected[step:]
    whole[1] = (whole[0] + whole[1]) / 2
    assert losses == pytest.approx(whole, abs=5e-6)
    assert newest(saved) == STEPS and not is_saving_another(saved)
