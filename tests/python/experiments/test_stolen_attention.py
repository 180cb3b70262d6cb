"""Keys on the hull, and the largest attention of a key, compared with known answers."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from support.markdown import tables_of

from megatron_sb.cli import main
from megatron_sb.experiments.key_hull import ATTENTIONS, largest_attention, on_hull
from megatron_sb.experiments.stolen_attention import StolenAttentionConfig
from megatron_sb.training.config import load_fields

CONFIGS = Path(__file__).parents[3] / "configs" / "experiments"
RNG = np.random.default_rng(0)


def separable(keys, index):
    """Return whether a hyperplane separates a key from all others, as a linear programme without facets."""
    others = np.delete(keys, index, axis=0) - keys[index]
    bounds = [(-1, 1)] * keys.shape[1] + [(None, None)]
    solution = linprog(
        [0] * keys.shape[1] + [-1], np.c_[others, np.ones(len(others))], np.zeros(len(others)), bounds=bounds
    )
    return -solution.fun > 1e-9


@pytest.mark.parametrize("head_dim", [2, 3, 5, 8])
def test_keys_on_the_hull_are_separable(head_dim):
    keys = RNG.standard_normal((40, head_dim))
    found = on_hull(keys)
    assert found.tolist() == [separable(keys, index) for index in range(40)]
    assert found.any()


def test_keys_inside_are_not_on_the_hull():
    corners = np.array([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    assert on_hull(np.vstack([corners, 0.9 * corners, [[0.0, 0.0]]])).tolist() == 4 * [True] + 5 * [False]


@pytest.mark.parametrize("shape", [(40, 9), (40, 1), (4, 3), (40,)])
def test_invalid_shapes(shape):
    with pytest.raises(ValueError, match=rf"keys .*{re.escape(str(shape))}"):
        on_hull(np.zeros(shape))


def test_keys_in_a_plane_are_an_error():
    with pytest.raises(ValueError, match=r"keys .*dimension 3"):
        on_hull(np.c_[RNG.standard_normal((40, 2)), np.zeros(40)])


def test_softmax_of_three_keys_on_a_line():
    """0 between -1 and 2 receives 1 / (1 + e^-t + e^2t), at most for t = log(1/2) / 3. An end receives almost 1."""
    keys = torch.tensor([[0.0, 0.0], [-1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    t = math.log(0.5) / 3
    middle, *ends = largest_attention(keys, "softmax", 50.0).tolist()
    assert middle == pytest.approx(1 / (1 + math.exp(-t) + math.exp(2 * t)), rel=2e-4)
    assert ends == pytest.approx([1, 1], abs=2e-4)


def test_the_attention_of_a_key_in_the_middle_of_others():
    """The centre of a square receives at most 1/5 of softmax attention, at q = 0.

    In Euclidean softmax it can receive almost 1, because q can be nearest to it. In stick-breaking it is the newest key
    and its logit is 0, so it receives 0.5.
    """
    corners = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    keys = torch.cat([corners, torch.zeros(1, 2, dtype=torch.float64)])
    largest = {name: largest_attention(keys, name, 100.0).tolist() for name in ATTENTIONS}
    assert largest["softmax"] == pytest.approx([1, 1, 1, 1, 0.2], abs=2e-4)
    assert largest["euclidean"] == pytest.approx([1, 1, 1, 1, 1], abs=2e-4)
    assert largest["stick_breaking"][4] == pytest.approx(0.5, abs=2e-4)  # a key of 0 has a logit of 0
    # If all keys are moved away from 0, a plane through 0 can separate each key from all newer keys.
    moved = largest_attention(keys + torch.tensor([3.0, 0.0]), "stick_breaking", 200.0).tolist()
    assert moved == pytest.approx([1, 1, 1, 1, 1], abs=2e-4)


def log_attention(name, query, keys, index, scale):
    """Return the logarithm of the attention of one key and one query, from the definition."""
    if name == "stick_breaking":
        logits = keys[index:] @ query
        return -np.logaddexp(0, -logits[0]) - np.logaddexp(0, logits[1:]).sum()
    logits = keys @ query if name == "softmax" else -scale * np.square(query - keys).sum(-1)
    return logits[index] - np.logaddexp.reduce(logits)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_another_optimiser_finds_the_same_maximum(name):
    """scipy starts from several points in the ball q = R u / sqrt(1 + |u|^2) and finds the same value."""
    keys, norm = RNG.standard_normal((20, 3)), 4.0
    keys -= keys.mean(0)
    scale = norm / (2 * np.linalg.norm(keys, axis=1).max())
    radius = norm / (2 * scale) if name == "euclidean" else norm
    found = largest_attention(torch.from_numpy(keys), name, norm).log().numpy()
    for index in (0, 9, 19):

        def negative_log_attention(u, index=index):
            return -log_attention(name, radius * u / np.sqrt(1 + u @ u), keys, index, scale)

        best = max(-minimize(negative_log_attention, start).fun for start in RNG.standard_normal((4, 3)))
        assert best - 2e-4 < found[index] < best + 1e-4


@pytest.mark.parametrize(
    ("attention", "norm", "message"), [("dot", 1.0, "attention .*'dot'"), ("softmax", 0.0, r"query_norm .*0\.0")]
)
def test_invalid_arguments_of_largest_attention(attention, norm, message):
    with pytest.raises(ValueError, match=message):
        largest_attention(torch.zeros(4, 2, dtype=torch.float64), attention, norm)


@pytest.mark.parametrize("form", ["stolen_attention", "stolen_attention_small"])
def test_both_configurations_are_valid(form):
    config = load_fields(StolenAttentionConfig, CONFIGS / f"{form}.yaml")
    assert config.head_dims == tuple(range(2, 9)) and config.key_means == (0.0, 4.0)


def test_the_command(tmp_path):
    """The command writes results, a table and a picture, and restores torch's number of threads."""
    config, threads = tmp_path / "hulls.yaml", torch.get_num_threads()
    config.write_text("head_dims: [2, 4]\nnum_keys: [16]\nkey_means: [0, 2]\n")
    assert (
        main(["experiment", "stolen-attention", str(config), "--out", str(tmp_path / "out"), "--set", "draws=2"]) == 0
    )
    assert torch.get_num_threads() == threads
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    shapes = [(entry["head_dim"], entry["num_keys"], entry["key_mean"]) for entry in results["entries"]]
    assert shapes == [(2, 16, 0.0), (2, 16, 2.0), (4, 16, 0.0), (4, 16, 2.0)]
    for entry in results["entries"]:
        softmax = entry["attention"]["softmax"]
        assert softmax["interior"] is None or softmax["interior"]["max"] <= 0.5
        assert softmax["hull"]["max"] > 0.99
        assert [len(values["by_age"]) for values in entry["attention"].values()] == [5, 5, 5]  # 1, 2, 3-4, 5-8, 9-16
    (table,) = tables_of((tmp_path / "out" / "table.md").read_text())
    assert len(table) == 1 + 4
    assert (tmp_path / "out" / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("head_dims=[9]", "head_dims.*9"),
        ("num_keys=[8]", "num_keys.*8"),
        ("head_dims=[]", r"head_dims .*got \[\]"),
        ("num_keys=[]", r"num_keys .*got \[\]"),
        ("key_means=[]", r"key_means .*got \[\]"),
        (f"seed={2**64}", f"seed.*{2**64}"),
        ("run=nowhere", "run must be the folder of a run of megatron-sb train, got 'nowhere'"),
    ],
)
def test_invalid_fields(change, message, tmp_path, capsys):
    config = tmp_path / "hulls.yaml"
    config.write_text("head_dims: [2]\nnum_keys: [16]\n")
    assert main(["experiment", "stolen-attention", str(config), "--set", change]) == 2
    assert re.search(message, capsys.readouterr().err)
