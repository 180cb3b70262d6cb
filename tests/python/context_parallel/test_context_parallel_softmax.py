"""Context parallelism of softmax attention on CPUs (gloo). Each check is a test; see test_context_parallel.py."""

import pytest
from support.launch import assert_passed, failures_on_cpus

TIMEOUT_SECONDS = 120

IN_SHORT = ("softmax_layouts_and_modes", "softmax_in_blocks_of_rows", "softmax_forget_gates")
CHECKS = {
    2: (
        *IN_SHORT,
        "softmax_blocks_with_another_default_device",
        "softmax_variants",
        "softmax_a2a_gives_the_bits_of_one_rank",
        "softmax_in_half_precision",
    ),
    3: (*IN_SHORT[:1], "softmax_without_the_last_rank"),
    4: (
        *IN_SHORT,
        "softmax_variants",
        "softmax_a2a_gives_the_bits_of_one_rank",
        "softmax_shares_a_plan_with_stick_breaking",
        "softmax_without_documents",
        "refuses_wrong_softmax_calls",
    ),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return failures_on_cpus(CHECKS, tmp_path_factory.mktemp("softmax"), TIMEOUT_SECONDS)


@pytest.mark.parametrize(("num_ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks])
def test_on_gloo(failures, num_ranks, check):
    """The check passes on every rank. The functions of this name in workers/context_parallel_softmax.py say more."""
    assert_passed(check, failures(num_ranks))
