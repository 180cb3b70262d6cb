"""A run's directory: which one it is, and that one job at a time writes to it."""

import dataclasses
import errno
import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_sb.training import directory
from megatron_sb.training.config import load_config, to_yaml
from megatron_sb.training.directory import check_is_marked, hold, mark, prepare_directory
from megatron_sb.validation import InputError

CONFIG = load_config(Path(__file__).parents[3] / "configs" / "tiny_context_extension.yaml", ["name=small"])


def begin(folder):
    """What makes it a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(CONFIG))


def test_a_new_run_and_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20300101-000000")
    with pytest.raises(ValueError, match="there is no runs/small-TIME"):
        prepare_directory(CONFIG, None, resume=True)
    with pytest.raises(ValueError, match="holds no run"):
        prepare_directory(CONFIG, str(tmp_path), resume=True)
    (first, one), (second, other) = (prepare_directory(CONFIG, None, resume=False) for _ in range(2))
    assert [str(first), str(second)] == ["runs/small-20300101-000000", "runs/small-20300101-000000-2"]
    for lock in (one, other):
        lock.close()
    begin(second)
    found, lock = prepare_directory(CONFIG, None, resume=True)
    lock.close()
    assert found == second
    with pytest.raises(ValueError, match="holds a run already"):
        prepare_directory(CONFIG, str(second), resume=False)
    prepare_directory(CONFIG, str(second), resume=True)[1].close()  # what was refused holds nothing


def test_the_newest_run_of_exactly_this_name(tmp_path, monkeypatch):
    """Runs of other names begin with it. Of runs that started in the same second, the number decides."""
    monkeypatch.chdir(tmp_path)
    own = [f"small-20300101-000000{number}" for number in ("", "-2", "-10")]
    for name in (*own, "small-20290101-000000-11", "small-long-20310101-000000", "small-2", "small-20310101"):
        begin(Path("runs") / name)
    found, lock = prepare_directory(CONFIG, None, resume=True)
    lock.close()
    assert found == Path("runs") / own[-1]


def test_a_lock_that_cannot_be_written_is_named():
    """As on a full disk."""
    with Path("/dev/full").open("a") as lock, pytest.raises(OSError, match="'/dev/full'"):
        mark(lock)


def test_another_path_to_the_same_initial_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changed = dataclasses.replace(CONFIG, compare=CONFIG.compare[:1], initial_checkpoint="base/step")
    (tmp_path / "config.yaml").write_text(to_yaml(changed))
    directory.refuse_changes(tmp_path, dataclasses.replace(changed, initial_checkpoint=str(tmp_path / "base/step")))
    with pytest.raises(ValueError, match=r"initial_checkpoint must be '/.*base/step', .* got '/.*base/other'"):
        directory.refuse_changes(tmp_path, dataclasses.replace(changed, initial_checkpoint="base/other"))


@pytest.mark.parametrize("left", ["small/checkpoints/latest", "evaluation/small.short.json", "metrics.jsonl"])
def test_results_without_a_configuration_are_refused(left, tmp_path):
    """A new run would train on them with any settings. A launcher's log may be there."""
    (tmp_path / "slurm.out").touch()
    prepare_directory(CONFIG, str(tmp_path), resume=False)[1].close()
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).touch()
    for _ in range(2):  # the refusal releases the lock
        with pytest.raises(ValueError, match=rf"{tmp_path} must be empty or have a config\.yaml, got {tmp_path}/"):
            prepare_directory(CONFIG, str(tmp_path), resume=False)
    with pytest.raises(ValueError, match="holds no run"):
        prepare_directory(CONFIG, str(tmp_path), resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_job_is_refused(resume, tmp_path, monkeypatch):
    """For as long as the first one's process lives."""
    monkeypatch.setattr(directory, "LOCK_WAIT_SECONDS", 0.2)
    code = (
        "import pathlib, sys, time\nfrom megatron_sb.training.directory import hold\n"
        "lock = hold(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)"
    )
    if resume:
        begin(tmp_path)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"^another job is writing to {tmp_path}$"):
            prepare_directory(CONFIG, str(tmp_path), resume)
        job.kill()
    prepare_directory(CONFIG, str(tmp_path), resume)[1].close()


def test_to_go_on_waits_for_the_job_that_ends(tmp_path, capsys):
    begin(tmp_path)
    lock = hold(tmp_path)
    threading.Timer(0.5, lock.close).start()
    prepare_directory(CONFIG, str(tmp_path), resume=True)[1].close()
    assert lock.closed
    assert capsys.readouterr().err.count(f"another job is writing to {tmp_path}; waiting up to 60 s") == 1


def test_where_there_are_no_locks_a_job_goes_on(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
        prepare_directory(CONFIG, str(tmp_path), resume=False)[1].close()


def test_other_ranks_see_the_directory_of_this_job(tmp_path):
    """A directory of the same name on another machine, with the token of an earlier job or without, is an error."""
    own, of_another_machine = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    with hold(own) as lock:
        earlier, token = mark(lock), mark(lock)
        check_is_marked(own, token, 0.0)
        for folder, of_rank_0 in ((of_another_machine, token), (own, earlier)):
            with pytest.raises(ValueError, match=rf"--out must be a folder .* that all machines share, got {folder}:"):
                check_is_marked(folder, of_rank_0, 0.0)
        late = threading.Timer(0.3, lambda: own.rename(of_another_machine))  # as on a network file system
        late.start()
        check_is_marked(of_another_machine, token, 20.0)
        late.join()


@pytest.mark.parametrize(
    "line", [b'{"loss": ', b"\0\0", b"\xff", b"[1]", b""], ids=["cut", "zeros", "no UTF-8", "list", "empty"]
)
def test_a_damaged_line_of_metrics(line, tmp_path):
    """As after a machine that stopped. A last line without an end is one that a crash cut off."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"loss": 1.0}\n' + line)
    assert directory.read_metrics(tmp_path) == [{"loss": 1.0}]
    path.write_bytes(b'{"loss": 1.0}\n' + line + b'\n{"loss": 0.5}\n')
    with pytest.raises(InputError, match=rf"line 2 of {path} is damaged, got .* Remove the line"):
        directory.read_metrics(tmp_path)
