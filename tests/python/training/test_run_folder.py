"""The folder of a run in place of a configuration: `megatron-sb train RUN --resume`."""

import pytest

from megatron_sb.training import config as configuration
from megatron_sb.training import launch
from megatron_sb.training.supervisor import EXIT_REFUSED

CONFIG = "configs/tiny_context_extension.yaml"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(configuration.to_yaml(configuration.load_config(CONFIG, ["seed=7"])))
    return folder


@pytest.fixture
def started(monkeypatch):
    """Record the jobs that `main` would start, as (configuration, command)."""
    jobs = []
    monkeypatch.setattr(launch, "start_ranks", lambda config, command: jobs.append((config, command)) or 0)
    monkeypatch.delenv("RANK", raising=False)
    return jobs


@pytest.mark.parametrize("with_out", [False, True])
def test_resume_takes_the_folder_of_a_run(run, started, with_out):
    assert launch.main(str(run), ["report.interval=3"], out=str(run) if with_out else None, resume=True) == 0
    [(config, command)] = started
    assert (config.seed, config.report.interval) == (7, 3)
    assert command[-5:] == [str(run / "config.yaml"), "report.interval=3", "--out", str(run), "--resume"]


def test_wrong_folders_are_refused(run, started, tmp_path, capfd):
    empty, none = tmp_path / "empty", tmp_path / "none"
    empty.mkdir()
    for path, out, resume, message in (
        (run, None, False, f"the configuration must be a YAML file, got the folder {run}. To continue a run, give"),
        (empty, None, True, f"--resume: {empty} holds no run, because it has no config.yaml"),
        (none, None, True, f"--resume needs the folder of a run or a configuration, got {none}, which does not exist"),
        (run, empty, True, f"--out must be absent or {run}, the run to resume, got {empty}"),
    ):
        assert launch.main(str(path), out=out and str(out), resume=resume) == EXIT_REFUSED
        assert message in capfd.readouterr().err
    assert not started
