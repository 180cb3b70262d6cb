"""Old module names can be imported for one more release, with a warning."""

import importlib
import sys

import pytest
from support.messages import mentions

import megatron_sb
from megatron_sb import _moved


@pytest.mark.parametrize(("old", "new"), _moved.MOVED.items())
def test_old_name_warns_and_gives_the_same_module(old, new):
    if new.startswith(("megatron_sb.training", "megatron_sb.checkpoints")):
        pytest.importorskip("pydantic")
        pytest.importorskip("transformers")
    expected = importlib.import_module(new)
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=mentions(f"{old} {new}")):
        assert importlib.import_module(old) is expected


@pytest.mark.parametrize("code", ["from megatron_sb import functional", "import megatron_sb; megatron_sb.functional"])
def test_the_warning_names_the_line_of_the_user(code):
    """Python hides a DeprecationWarning that names a line of another module than __main__."""
    vars(megatron_sb).pop("functional", None)
    sys.modules.pop("megatron_sb.functional", None)
    words = mentions("megatron_sb.functional megatron_sb.ops")
    with pytest.warns(DeprecationWarning, match=words) as warned:
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
    assert [warning.filename for warning in warned] == ["script.py"]


def test_old_name_of_a_submodule():
    sys.modules.pop("megatron_sb.modules.gates", None)
    with pytest.warns(DeprecationWarning, match=mentions("megatron_sb.modules.gates megatron_sb.nn.gates")):
        old = importlib.import_module("megatron_sb.modules.gates")
    assert old is importlib.import_module("megatron_sb.nn.gates")
