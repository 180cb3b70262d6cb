"""Megatron's training loop on two hosts, which are network namespaces with a slow network between them."""

import re
import signal
import time

import pytest
from support.fork_server import PythonProcess
from support.hosts import missing, two_hosts
from support.jobs import kill_while
from support.megatron_loop import FP32, is_saving_another, needs_training, newest, rank_of, started_torchrun, train

pytestmark = [needs_training, pytest.mark.skipif(bool(missing()), reason=missing() or "can simulate hosts")]
STEPS = 8
LOGGED = r"iteration +(\d+)/.* lm loss: (\S+)"
MODEL = f"--use-cpu-initialization --calculate-per-token-loss --sb-remainder-bias --train-iters {STEPS}".split()
EXPERTS = "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --moe-token-dispatcher-type alltoall"
LAYOUTS = {
    "heads within a host, ring between hosts": "--context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2",
    "experts on both hosts": f"{EXPERTS} --expert-model-parallel-size 4 --use-distributed-optimizer",
    "a stage on each host": "--pipeline-model-parallel-size 2 --context-parallel-size 2",
}
LONG_STEPS = 20  # of the jobs that lose a host
LONG_JOB = [*MODEL[:-1], str(LONG_STEPS), "--context-parallel-size", "2", "--use-distributed-optimizer"]
SECONDS_AT_MOST = 300  # for a job that takes less than a minute: the machine may be busy


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """The losses of a job of two ranks that never stops."""
    return train("cpu", 2, tmp_path_factory.mktemp("whole"), *LONG_JOB, model=FP32)


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_are_those_of_one_host(flags, tmp_path, record_property):
    """Two ranks on each host, against four ranks on one."""
    expected = train("cpu", 4, tmp_path, *MODEL, *flags.split(), model=FP32)
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5
    with two_hosts() as hosts:
        record_property("network", hosts[0].limit)
        losses = train("cpu", 4, tmp_path, *MODEL, *flags.split(), model=FP32, hosts=hosts)
        sent = [host.bytes_sent for host in hosts]
    assert losses == expected
    assert min(sent) > 100_000, "the hosts talk through their network"


def test_packed_micro_batches_that_differ_by_host(tmp_path):
    """Each host is a data-parallel rank of two context-parallel ranks, and packs other documents."""
    flags = [*MODEL, "--context-parallel-size", "2", "--dataloader-inter-document-masking"]
    expected = train("cpu", 4, tmp_path, *flags, model=FP32)
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.5
    with two_hosts() as hosts:
        losses = train("cpu", 4, tmp_path, *flags, "--record-documents", str(tmp_path), model=FP32, hosts=hosts)
    assert losses == expected
    offsets = [(tmp_path / f"rank_{rank}").read_text().splitlines() for rank in range(4)]
    assert offsets[0] == offsets[1] and offsets[2] == offsets[3], "the ranks of a host share each micro-batch"
    assert len(offsets[0]) == len(offsets[2]) == 2 * STEPS  # micro-batches
    assert all(one != other for one, other in zip(offsets[0], offsets[2], strict=True))
    assert all(len(line.split()) > 2 for rank in offsets for line in rank), "each has several documents"


def test_a_host_is_lost_while_it_saves(expected, tmp_path, record_property):
    """All processes of a host are killed. The other host ends with an error, and both are started again.

    The losses are those of a job that never stopped.
    """
    saved = tmp_path / "saved"
    save = f"--save {saved} --load {saved} --save-interval 2 --async-save --use-persistent-ckpt-worker"
    flags = [*LONG_JOB, *save.split(), "--async-strategy", "mcore"]
    with two_hosts() as hosts, started_torchrun(hosts, tmp_path, *flags, model=FP32) as start:
        first, second = start(0), start(1)
        while not newest(saved):
            time.sleep(0.01)
            assert first.returncode is second.returncode is None, first.stderr + second.stderr
        other = rank_of(first)
        kill_while([second], lambda: is_saving_another(saved))
        killed, step = time.monotonic(), newest(saved)
        other.wait(60)
        record_property("seconds_to_error", time.monotonic() - killed)
        assert first.wait(60) != 0
        assert_resumed([start(0), start(1)], step, expected)
    assert newest(saved) == LONG_STEPS and not is_saving_another(saved)


def test_a_host_is_lost_in_the_backward(expected, tmp_path, record_property):
    """All processes of a host are killed while the other one waits for it in the backward of an attention layer.

    The other host ends with an error. Both are started again, from the newest checkpoint.
    """
    saved, step, lost = tmp_path / "saved", 12, 16
    flags = [*LONG_JOB, *f"--save {saved} --load {saved} --save-interval {step}".split()]
    with two_hosts() as hosts, started_torchrun(hosts, tmp_path, *flags, model=FP32) as start:
        first, second = start(0), start(1, "--kill-in-backward", str(lost))
        assert second.wait(SECONDS_AT_MOST) == -signal.SIGKILL, first.stderr + second.stderr
        killed = time.monotonic()
        assert first.wait(60) > 0
        record_property("seconds_to_error", time.monotonic() - killed)
        assert re.search(r"context parallelism, rank 0 of 2: \w+ failed", first.stderr), first.stderr[-4000:]
        assert max(losses_of(first, second)) == lost - 1
        assert newest(saved) == step
        assert_resumed([start(0), start(1)], step, expected)
    assert newest(saved) == LONG_STEPS and not is_saving_another(saved)


def losses_of(*jobs: PythonProcess) -> dict[int, float]:
    """Return the losses that the jobs have logged, by step."""
    return {int(number): float(loss) for job in jobs for number, loss in re.findall(LOGGED, job.stdout)}


def assert_resumed(jobs: list[PythonProcess], step: int, expected: list[float]) -> None:
    """Assert that the jobs resume after a step, and end with the losses of a job that never stopped."""
    assert [job.wait(SECONDS_AT_MOST) for job in jobs] == [0, 0], "".join(job.stderr for job in jobs)
    found = losses_of(*jobs)
    # After a resume, the second loss that Megatron logs is the mean of both.
    resumed = [found[number] for number in range(step + 1, LONG_STEPS + 1) if number != step + 2]
    assert min(found) == step + 1
    assert resumed == pytest.approx([expected[step], *expected[step + 2 :]], abs=5e-6)
