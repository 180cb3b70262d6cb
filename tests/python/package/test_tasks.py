"""Tasks of the trainer: the table of this package, and kinds that another package adds with an entry point."""

import sys

import pytest

from megatron_sb._tasks import ENTRY_POINTS, TASKS, find_tasks, import_object

ADDED_TASK = '''
from typing import Literal

from megatron_sb.training.config.data import DataConfig
from megatron_sb.training.config.types import section


@section
class CopyDataConfig(DataConfig):
    """Copies of a word."""

    kind: Literal["copy"] = "copy"
    num_copies: int = 2
    task = "added_tasks:CopyTask"


class CopyTask:
    """Hold the configuration."""

    def __init__(self, config):
        self.config = config
'''


@pytest.fixture
def added_package(tmp_path, monkeypatch):
    """Install a package that adds the kind "copy" and tries to replace the kind "text"."""
    (tmp_path / "added_tasks.py").write_text(ADDED_TASK)
    metadata = tmp_path / "added_tasks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: added-tasks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\ncopy = added_tasks:CopyDataConfig\ntext = added_tasks:CopyDataConfig\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("added_tasks", None)


def test_without_other_packages_there_are_the_kinds_of_the_table():
    assert find_tasks() == TASKS


def test_an_entry_point_adds_a_kind(added_package):
    assert find_tasks() == TASKS | {"copy": ("added_tasks:CopyDataConfig",)}


def test_a_configuration_can_use_an_added_kind(added_package):
    pytest.importorskip("pydantic")
    from megatron_sb.training.config.tasks import read_data_section

    section = read_data_section({"kind": "copy", "num_copies": 3})
    assert type(section).__name__ == "CopyDataConfig" and section.num_copies == 3
    task = import_object(section.task)(section)
    assert type(task).__name__ == "CopyTask" and task.config is section


def test_an_unknown_kind_is_an_error_that_lists_added_kinds(added_package):
    pytest.importorskip("pydantic")
    from megatron_sb.training.config.tasks import read_data_section
    from megatron_sb.training.config.types import ConfigError

    with pytest.raises(ConfigError, match=r"data\.kind must be one of .*'copy'.*, got 'unknown'"):
        read_data_section({"kind": "unknown"})


@pytest.mark.parametrize("name", [name for names in TASKS.values() for name in names])
def test_the_classes_of_the_table_exist(name):
    for package in ("pydantic", "yaml"):
        pytest.importorskip(package)
    assert import_object(name).__name__ == name.partition(":")[2]
