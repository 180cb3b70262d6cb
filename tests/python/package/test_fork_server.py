"""The server that forks Python processes for tests."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from support import fork_server
from support.fork_server import PythonProcess


def test_threads_that_start_processes_leave_the_environment(monkeypatch):
    """The runs of a sweep are started by threads."""
    ensure_running = fork_server.forkserver.ensure_running

    def slowly():
        time.sleep(0.1)
        ensure_running()

    monkeypatch.setattr(fork_server.forkserver, "ensure_running", slowly)
    code = "import os; print(os.environ.get('TORCHDYNAMO_DISABLE'))"
    before = dict(os.environ)

    def start(number):
        time.sleep(0.03 * number)
        return PythonProcess(["-m", "timeit", "-n", "1", "-r", "1", code])

    with ThreadPoolExecutor(3) as pool:
        processes = list(pool.map(start, range(3)))
    try:
        assert dict(os.environ) == before
        assert [process.wait(240) for process in processes] == [0, 0, 0]
        assert [process.stdout.splitlines()[0] for process in processes] == ["None"] * 3
    finally:
        for process in processes:
            process.close()
