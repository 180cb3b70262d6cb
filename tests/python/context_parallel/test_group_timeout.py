"""The timeout of a process group. Only with torch 2.8 does the C++ code ask Python for it; here with any torch."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_sb.ops import group_timeout
from megatron_sb.torch_version import major_minor


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    yield
    dist.destroy_process_group()


def test_each_group_has_its_own(one_rank):
    group = dist.new_group([0], timeout=timedelta(milliseconds=2500))
    assert group_timeout.group_timeout(dist.group.WORLD.group_name) == 7000
    assert group_timeout.group_timeout(group.group_name) == 2500


def test_it_is_at_most_the_default_of_torch(one_rank):
    """As with later versions of torch: csrc/distributed/group_properties.cpp."""
    group = dist.new_group([0], timeout=timedelta(hours=2))
    assert group_timeout.group_timeout(group.group_name) == dist.default_pg_timeout / timedelta(milliseconds=1)


def test_the_operator_exists_where_it_is_needed():
    assert hasattr(torch.ops.megatron_sb, "group_timeout") == (major_minor(torch.__version__) < (2, 9))
