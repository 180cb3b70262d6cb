"""The examples in the docstrings run."""

import doctest

from megatron_sb import checkpoints


def test_examples():
    result = doctest.testmod(checkpoints)
    assert result.attempted > 10 and result.failed == 0
