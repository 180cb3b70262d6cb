"""The engine: the same training on any layout."""

import pytest
from support.launch import run_worker


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """{family: {"one rank": results}}."""
    return run_worker("training_layouts.py", 1, tmp_path_factory.mktemp("layouts") / "one.json")


@pytest.fixture(scope="module")
def runs(alone, tmp_path_factory):
    """{family: {layout: results}} on four ranks, each family's on one rank as "one rank"; refusals and group counts."""
    together = run_worker("training_layouts.py", 4, tmp_path_factory.mktemp("layouts") / "four.json")
    return together | {family: together[family] | alone[family] for family in alone}


def assert_same_training(layouts, expected, loss, rest):
    """Losses, gradient norms and evaluated windows of each layout are those of one rank, and something was learned."""
    assert expected["losses"][-1] < expected["losses"][0] - 0.3 and sum(expected["hits"]) > 16
    for name, run in layouts.items():
        assert run["losses"] == pytest.approx(expected["losses"], abs=loss), name
        assert run["norms"] == pytest.approx(expected["norms"], rel=rest), name
        # A token between two experts that are all but equal to it may be sent to the other.
        assert run["windows"] == pytest.approx(expected["windows"], rel=rest), name
        assert run["hits"] == pytest.approx(expected["hits"], abs=1), name  # of two tokens that are all but as likely


@pytest.mark.parametrize(
    ("family", "num_layouts"),
    [
        ("dense", 9),
        ("softmax", 5),
        ("mixed", 2),
        ("no padding", 3),
        ("odd rows", 2),
        ("mixture", 2),
        ("mixture, no auxiliary loss", 2),
    ],
)
def test_every_layout_gives_the_training_of_one_rank(runs, family, num_layouts):
    """Tensor, sequence, expert and context parallelism, recomputation, checkpoints, micro-batches; padding uneven."""
    layouts = dict(runs[family])
    expected = layouts.pop("one rank")
    fewest = 2 if family in ("no padding", "odd rows") else 4  # hits in a row: its rows have other documents
    assert len(layouts) == num_layouts and all(hits > fewest for hits in expected["hits"])
    assert_same_training(layouts, expected, 2e-5, 1e-4)


def test_megatrons_optimizer_and_checkpoints(alone, tmp_path):
    """Megatron's gradients, distributed optimizer and checkpoints on CPUs; other layouts take the last step."""
    together = run_worker("training_layouts.py", 4, tmp_path / "four.json", "megatron")
    assert sum(map(len, together.values())) == 6
    for family, layouts in together.items():
        assert_same_training(layouts, alone[family]["one rank"], 2e-5, 1e-4)


@pytest.mark.multigpu
def test_on_two_gpus(tmp_path):
    """The same over NCCL, with the alltoall dispatcher and recomputation, fp32."""
    alone = run_worker("training_layouts.py", 1, tmp_path / "one.json", "cuda", device="cuda")
    together = run_worker("training_layouts.py", 2, tmp_path / "two.json", "cuda", device="cuda")
    assert sum(map(len, together.values())) == 11
    for family, layouts in together.items():
        assert_same_training(layouts, alone[family]["one rank"], 1e-3, 1e-3)


def test_a_checkpoint_of_other_shares_is_refused(runs):
    assert "was saved with another parallel.tensor_parallel_size" in runs["refused checkpoint"]


def test_engines_destroy_their_process_groups(runs):
    """Only the default group is left after all engines of the worker, and after a constructor that fails."""
    assert runs["process groups"] == 1
    assert runs["process groups after a failure"] == 1


def test_the_runs_can_tell_layouts_apart(runs):
    """Ranks count different numbers of labels; the auxiliary loss is seen, a hundredth of it would be."""
    assert len(set(runs["dense"]["data parallel, micro-batches"]["counted"])) == 4
    with_loss, without = (runs[family]["one rank"] for family in ("mixture", "mixture, no auxiliary loss"))
    assert with_loss["losses"][0] == pytest.approx(without["losses"][0], abs=2e-5), "the same weights"
    assert with_loss["losses"] != pytest.approx(without["losses"], abs=2e-3)
