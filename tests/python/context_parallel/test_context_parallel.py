"""Context parallelism on CPUs (gloo). One group of ranks runs many checks, and each check is a test."""

import pytest
from support.launch import assert_passed, failures_on_cpus

TIMEOUT_SECONDS = 240

EVERYTHING = (
    "same_answer_as_one_rank",
    "same_answer_at_2k",
    "streams_of_any_length",
    "a2a_gives_the_bits_of_one_rank",
    "options_are_passed_on",
    "variants_of_the_logit",
    "repeats_bit_for_bit",
    "subgroups",
    "a_mesh_is_a_group",
    "meshes_are_hierarchical_groups",
    "with_sharded_parameters",
    "a_layer_with_sharded_parameters",
    "dtensors",
    "reach_needs_to_know_the_heads",
    "reach_at_its_bound",
    "variants_of_the_attention_in_a_shared_sequence",
    "refuses_wrong_use_of_a_shared_sequence",
    "a_plan_serves_many_calls",
    "a_plan_counts_received_bytes",
    "strides_are_taken_as_they_are",
    "negated_views",
    "autocast",
    "gradients_of_one_result",
    "mass_in_one_ranks_loss",
    "shard_and_unshard",
    "refuses_unequal_chunks",
    "refuses_bad_offsets",
    "refuses_ranks_that_disagree",
    "refuses_plans_of_other_batches",
    "refuses_hierarchies_that_disagree",
    "refuses_bad_calls",
    "refuses_wrong_groups",
    "refuses_a_second_derivative",
)
CHECKS = {
    2: (
        "same_answer_as_one_rank",
        "same_answer_at_2k",
        "streams_of_any_length",
        "a2a_gives_the_bits_of_one_rank",
        "groups_of_one_rank",
        "a_transformers_model_is_untouched",
        "with_sharded_parameters",
        "dtensors",
        "shard_and_unshard",
        "refuses_ranks_that_disagree",
    ),
    3: (
        "same_answer_as_one_rank_in_short",
        "streams_of_any_length",
        "a_plan_counts_received_bytes",
        "shard_and_unshard",
        "shard_and_unshard_dtypes",
    ),
    4: EVERYTHING,
    5: ("streams_of_any_length", "shard_and_unshard"),
    8: (
        "same_answer_as_one_rank_in_short",
        "same_answer_at_2k",
        "a2a_gives_the_bits_of_one_rank",
        "refuses_ranks_that_disagree",
    ),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    return failures_on_cpus(CHECKS, tmp_path_factory.mktemp("context_parallel"), TIMEOUT_SECONDS)


@pytest.mark.parametrize(("num_ranks", "check"), [(n, check) for n, checks in CHECKS.items() for check in checks])
def test_on_gloo(failures, num_ranks, check):
    """The check passes on every rank. The functions of this name in workers/context_parallel_*.py say what it tests."""
    assert_passed(check, failures(num_ranks))
