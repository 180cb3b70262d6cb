"""Megatron's training loop on two hosts, which are network namespaces with a slow network between them."""

import re
import time

import pytest
from support.hosts import missing, two_hosts
from support.jobs import kill_while
from support.megatron_loop import FP32, is_saving_another, needs_training, newest, rank_of, started_torchrun, train

pytestmark = [needs_training, pytest.mark.skipif(bool(missing()), reason=missing() or "can simulate hosts")]
STEPS = 8
LOGGED = r"iteration +(\d+)/.* lm loss: ([\d.E+-]+)"
MODEL = f"--use-cpu-initialization --calculate-per-token-loss --sb-remainder-bias --train-iters {STEPS}".split()
EXPERTS = "--num-experts 4 --moe-grouped-gemm --disable-bias-linear --moe-token-dispatcher-type alltoall"
LAYOUTS = {
    "heads within a host, ring between hosts": "--context-parallel-size 4 --cp-comm-type a2a+p2p "
    "--hierarchical-context-parallel-sizes 2 2",
    "experts on both hosts": f"{EXPERTS} --expert-model-parallel-size 4 --use-distributed-optimizer",
    "a stage on each host": "--pipeline-model-parallel-size 2 --context-parallel-size 2",
}


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


def test_a_host_is_lost_while_it_saves(tmp_path, record_property):
    """All processes of a host are killed. The other host ends with an error, and both are started again.

    The losses are those of a job that never stopped.
    """
    steps, saved = 20, tmp_path / "saved"
    model = [*MODEL[:-1], str(steps), "--context-parallel-size", "2", "--use-distributed-optimizer"]
    expected = train("cpu", 2, tmp_path, *model, model=FP32)
    save = f"--save {saved} --load {saved} --save-interval 2 --async-save --use-persistent-ckpt-worker"
    flags = [*model, *save.split(), "--async-strategy", "mcore"]
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
        first, second = start(0), start(1)
        assert [process.wait(120) for process in (first, second)] == [0, 0], first.stderr + second.stderr
        found = {int(number): float(loss) for number, loss in re.findall(LOGGED, first.stdout + second.stdout)}
    # After a resume, the second loss that Megatron logs is the mean of both.
    resumed = [found[number] for number in range(step + 1, steps + 1) if number != step + 2]
    assert resumed == pytest.approx([expected[step], *expected[step + 2 :]], abs=5e-6)
    assert newest(saved) == steps and not is_saving_another(saved)
