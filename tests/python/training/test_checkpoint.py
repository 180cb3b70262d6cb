"""Directories of checkpoints: which one is the newest, which stay."""

import pytest
import torch.distributed as dist

from megatron_sb.training.checkpoint import CheckpointDirectory, Progress


class Engine:
    """Writes where it is told to."""

    def save(self, path):
        (path / "weights").write_text(path.name)

    def load(self, path):
        self.loaded = (path / "weights").read_text()


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def progress(stage, step):
    return Progress(stage, step, 10 * step, {"epoch": 0, "taken": step}, {})


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_of_each_stage_stay(tmp_path, one_rank):
    checkpoints, engine = CheckpointDirectory(tmp_path, keep=2), Engine()
    assert checkpoints.latest() is None
    for stage, step in (("a", 1), ("a", 2), ("a", 3), ("b", 1)):
        checkpoints.save(engine, progress(stage, step))
    assert names(tmp_path) == ["a-000002", "a-000003", "b-000001", "latest"]
    assert checkpoints.latest() == progress("b", 1)
    checkpoints.load(engine, progress("a", 3))
    assert engine.loaded == ".a-000003.tmp"


def test_a_million_steps_have_seven_digits(tmp_path, one_rank):
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    for step in (999_800, 999_900, 1_000_000, 1_000_100):
        checkpoints.save(Engine(), progress("a", step))
    assert names(tmp_path) == ["a-1000000", "a-1000100", "latest"]
    checkpoints.save(Engine(), progress("a", 2_000_000))
    assert names(tmp_path) == ["a-1000100", "a-2000000", "latest"]


def test_what_a_run_could_not_name_does_not_push_out_the_newest(tmp_path, one_rank):
    """It died between the checkpoint of step 30 and its name, and goes on from step 10 with another interval."""
    checkpoints = CheckpointDirectory(tmp_path, keep=1)
    checkpoints.save(Engine(), progress("a", 30))
    checkpoints.save(Engine(), progress("a", 10))
    checkpoints.save(Engine(), progress("a", 20))
    assert checkpoints.latest() == progress("a", 20) and checkpoints.path(progress("a", 20)).is_dir()
    assert names(tmp_path) == ["a-000020", "a-000030", "latest"]


def test_a_resumed_run_removes_a_half_written_checkpoint(tmp_path, one_rank):
    """As of a step that a signal stopped: no other job saves after that step."""
    half = tmp_path / ".a-000137.tmp"
    half.mkdir()
    (half / "model").touch()
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    assert checkpoints.restore_latest() == [] and not half.exists()
    assert CheckpointDirectory(tmp_path / "nothing", keep=2).restore_latest() == []


def test_ranks_agree_on_the_newest_checkpoint(tmp_path, one_rank, monkeypatch):
    """A rank of another machine can see `latest` later than rank 0. It saved alone then, and waited for the others."""
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    checkpoints.save(Engine(), progress("a", 1))

    def broadcast(answer, src):
        assert (answer, src) == ([None], 0)
        answer[0] = True  # rank 0 finds that the checkpoint of step 2 is the newest one

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    assert checkpoints.save(Engine(), progress("a", 2)) == tmp_path / "a-000002"
    assert names(tmp_path) == ["a-000001", "latest"]
