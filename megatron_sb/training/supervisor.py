"""Supervision of the ranks that `megatron-sb train` starts on this machine.

The supervisor forwards a signal of STOP_SIGNALS once, so that the ranks save and stop. It ends all ranks when one
fails. The ranks end when the supervisor is killed. docs/design/supervision.md lists all events and explains why torch's
elastic launch is not used.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sb.training.config import TrainingConfig

if TYPE_CHECKING:
    from torch.distributed import TCPStore

EXIT_FAILED = 1
EXIT_REFUSED = 2  # a configuration or a directory that a rank rejected
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal that is closed sends the last one
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)
GRACE_SECONDS = 10.0  # after a rank has failed, time for the others to report why they end
POLL_SECONDS = 0.1
PARENT_PIPE = "MEGATRON_SB_PARENT_PIPE"
NEWEST_CHECKPOINT = "megatron_sb/newest_checkpoint"  # key of the store: rank 0 sets it, the supervisor reads it


def say(text: str, *, beside_bar: bool = False) -> None:
    """Print a message of `megatron-sb train` to standard error.

    beside_bar: whether rank 0 may show its progress bar, which has not ended its line. Default False.
    """
    start = "\n" if beside_bar else ""
    print(f"{start}megatron-sb train: {text}", file=sys.stderr, flush=True)


def note_checkpoint(path: Path) -> None:
    """Tell the supervisor which checkpoint a resumed job would start from. Rank 0 calls this; needs a supervisor."""
    if PARENT_PIPE in os.environ:
        from torch.distributed import TCPStore

        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store.set(NEWEST_CHECKPOINT, str(path))


def start_ranks(config: TrainingConfig, command: list[str]) -> int:
    """Run `command` once per rank and wait for all ranks.

    This function forwards a signal of STOP_SIGNALS to the ranks once. They then save and stop. A second signal kills
    the ranks. If another process started this one with `PARENT_PIPE`, the end of that process acts like SIGINT.

    Returns:
        The job's exit status; see `training.launch.main`.
    """
    # The ranks meet at a store of this process, as under torchrun. If this process only looked up a free port for
    # rank 0, another job could take the port before rank 0 listens on it.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    received: list[int] = []
    ranks: list[subprocess.Popen] = []
    with listener, parent_pipe() as pipe, noting_signals(received):
        when_parent_is_gone(lambda: os.kill(os.getpid(), signal.SIGINT))
        try:
            for rank in range(config.parallel.ranks):
                environment = _environment_of(rank, config, port, pipe)
                # Each rank has its own session. Ctrl-C then reaches only this process, which forwards it once.
                ranks.append(subprocess.Popen(command, env=environment, pass_fds=(pipe,), start_new_session=True))
            return _wait(ranks, received, config.parallel.timeout_seconds, _serve_store(listener))
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):  # the group includes Megatron-Core's helper processes
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _serve_store(listener: socket.socket) -> TCPStore:
    """Serve a store on a listening socket, which the store then owns.

    The ranks start before this process imports torch: the import takes seconds. Until then their connections wait.
    """
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextlib.contextmanager
def parent_pipe() -> Iterator[int]:
    """Yield the read end of a pipe that is never written to.

    Pass the read end to child processes, with its number in the environment variable `PARENT_PIPE`. Only this process
    holds the write end. A child therefore reads the end of the file when this process is gone or leaves the context.
    """
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


@contextlib.contextmanager
def noting_signals(received: list[int]) -> Iterator[None]:
    """Append the signals of STOP_SIGNALS to `received` instead of acting on them.

    A terminal that is closed sends SIGHUP several times: from the kernel, and from its shell. So SIGHUP is only noted
    as the first signal, and never asks for an end without saving.
    """

    def note(number: int, frame: object) -> None:
        if number != signal.SIGHUP or not received:
            received.append(number)

    previous = {number: signal.signal(number, note) for number in signals_to_note()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def signals_to_note() -> tuple[signal.Signals, ...]:
    """Return STOP_SIGNALS, without SIGHUP if this process ignores it, as under nohup."""
    ignored = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ()
    return tuple(number for number in STOP_SIGNALS if number not in ignored)


def when_parent_is_gone(act: Callable[[], None]) -> None:
    """Call `act` in a thread when the process that started this one is gone. Needs `PARENT_PIPE`."""
    if PARENT_PIPE not in os.environ:
        return
    descriptor = int(os.environ[PARENT_PIPE])

    def wait() -> None:
        os.read(descriptor, 1)
        act()

    threading.Thread(target=wait, daemon=True).start()


def _environment_of(rank: int, config: TrainingConfig, port: int, pipe: int) -> dict[str, str]:
    num_ranks = config.parallel.ranks
    threads = config.parallel.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // num_ranks)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": threads,
        PARENT_PIPE: pipe,
    }
    return {**os.environ, **{name: str(value) for name, value in variables.items()}}


def _wait(ranks: list[subprocess.Popen], received: list[int], timeout_seconds: float, store: TCPStore) -> int:
    """Wait until all ranks have ended, one has failed, or a stop takes too long. Return the job's status."""
    deadline = None
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0, *STOP_CODES)), None)
        if failed is not None:
            return _end_after_failure(ranks, failed, received, store)
        if None not in codes:
            return max(codes)
        if received and deadline is None:
            deadline = time.monotonic() + timeout_seconds
            name = signal.Signals(received[0]).name
            say(f"{name} received; saving after this step. Send it again to end at once.", beside_bar=True)
            for process in ranks:
                process.send_signal(received[0])
        if len(received) > 1:
            say("second signal received; ending all ranks without saving", beside_bar=True)
            return 128 + received[0]
        if deadline and time.monotonic() > deadline:
            say(
                f"the ranks have not stopped within parallel.timeout_seconds = {timeout_seconds:g}; "
                "ending all ranks without saving",
                beside_bar=True,
            )
            return 128 + received[0]
        time.sleep(POLL_SECONDS)


def _end_after_failure(ranks: list[subprocess.Popen], rank: int, received: list[int], store: TCPStore) -> int:
    """Report how a rank ended, and give the others GRACE_SECONDS to end. Return the job's status."""
    code = ranks[rank].returncode
    if code == EXIT_REFUSED:  # the first rank that ends has printed the reason: see `rank.refuse`
        return EXIT_REFUSED
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    when = " before it could save" if received else ""
    saved = "This job has saved no checkpoint."
    if store.check([NEWEST_CHECKPOINT]):
        saved = f"Use --resume to continue from {store.get(NEWEST_CHECKPOINT).decode()}."
    say(f"rank {rank} (process {ranks[rank].pid}) {how}{when}; ending the job. {saved}", beside_bar=True)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return 128 + received[0] if received else EXIT_FAILED
