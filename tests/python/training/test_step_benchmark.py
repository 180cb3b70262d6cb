"""benchmarks/training.py on a CPU: with changed weights, and with the weights and the text of a run."""

import contextlib
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fork_server import run_python
from support.jobs import SMALL_JOB, train

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "training.py"
REACH = "attention.with_reach={kind: stick_breaking, reach: [0.5, 4.0]}"
STEPS = ["parallel.ranks=1", "report.tensorboard=false", "evaluation.length_factor=2", "compare=[with_reach]", REACH]
STEPS += ["model.init_std=0.3"]  # with such large weights, few keys use up the mass
STEPS += [f"stages.{n}.{field}" for n in (0, 1) for field in ("context_parallel_size=1", "steps=2", "rows_per_step=2")]
STEPS += [f"stages.{n}.warmup_steps=1" for n in (0, 1)]
FAST = ["--lengths", "128", "1024", "--tokens", "2048", "--tokens-at-once", "1024"]
FAST += ["--seconds", "0.001", "--warm-steps", "0", "--least-steps", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of a model with reach."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(SMALL_JOB)
    status, _, errors = train(folder / "small.yaml", *STEPS, "--out", folder / "run")
    assert status == 0, errors
    return folder / "run"


@pytest.fixture
def measured(run, tmp_path):
    """Return the rows and the printed lines of the script with these options."""

    def of(*options: object) -> tuple[list[dict], list[str]]:
        out = tmp_path / "out.json"
        done = run_python([SCRIPT, run / "config.yaml", *FAST, *options, "--json", out], seconds=120)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())["rows"], [line for line in done.stdout.splitlines() if "tokens/s" in line]

    return of


def test_a_trained_model_beside_every_tile_and_softmax(run, measured):
    checkpoints = run / "with_reach" / "checkpoints"
    rows, lines = measured("--checkpoint", checkpoints, "--softmax", "cudnn", "flash")
    contenders = [("with_reach", "trained", ""), ("with_reach", "changed", "")]
    contenders += [("softmax_rope", "trained", "cudnn"), ("softmax_rope", "trained", "flash")]
    found = [(row["model"], row["weights"], row["kernels"], row["length"], row["note"]) for row in rows]
    measurements = ((128, ""), (1024, ""), (128, "again"))
    assert found == [(*contender, *measurement) for contender in contenders for measurement in measurements]
    assert all(row["tokens_per_second"] > 0 and row["model_tflops"] > 0 for row in rows)
    assert all("documents" in row["rows"] for row in rows) and len(lines) == len(rows)
    short, long, again, *others = (row["skipped"] for row in rows)
    assert 0 <= short < long < 1, "a longer context skips more"
    assert again == short, "the measured steps do not change the weights"
    assert others == [0.0] * 3 + [None] * 6
    # The layout of the configuration does not matter: there is one rank.
    layout = ["--set", "stages.1.context_parallel_size=2", "--set", "parallel.ranks=2"]
    named, _ = measured("--checkpoint", checkpoints / "extended-000002", "--models", "stick_breaking", *layout)
    assert [row["skipped"] for row in named] == [row["skipped"] for row in rows[:6]]


def test_a_distilled_model_is_measured_without_its_teacher(run, measured):
    """The teacher's checkpoint need not exist."""
    distilled = ["teacher=softmax_rope", "initial_checkpoint=missing", "initial_attention=softmax"]
    distilled += [f"stages.{n}.loss=logits" for n in (0, 1)]
    words = [word for override in distilled for word in ("--set", override)]
    rows, _ = measured("--checkpoint", run / "with_reach" / "checkpoints", "--models", "stick_breaking", *words)
    assert [row["weights"] for row in rows] == ["trained"] * 3 + ["changed"] * 3
    assert [row["skipped"] for row in rows[3:]] == [0.0] * 3


def test_changed_weights_and_random_tokens(measured):
    rows, _ = measured()
    assert [row["model"] for row in rows] == ["stick_breaking"] * 3 + ["softmax_rope"] * 3
    assert [row["skipped"] for row in rows] == [0.0] * 3 + [None] * 3
    assert {row["weights"] for row in rows} == {"changed"}
    assert [row["rows"] for row in rows[:2]] == ["16 of random tokens", "2 of random tokens"]


class Documents:
    """Held-out documents: document n has lengths[n] tokens, all n."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return np.full(min(stop, self.lengths[document]) - start, document, dtype=np.int64)


@pytest.fixture
def text_rows(monkeypatch):
    """The class `TextRows` of the script, which is not in a package."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("training").TextRows


def test_rows_of_long_documents(text_rows):
    rows = text_rows(Documents(9, 4, 8, 3, 7))
    first, second = rows.micro_batches(6, 2, 2)  # the fourth row is a document that another row has
    assert [sorted(set(batch.tokens.tolist())) for batch in (first, second)] == [[0], [2, 4]]
    assert first.cu_seqlens.tolist() == [0, 6, 12] and first.counted.all()
    assert rows.kind == "beginnings of 3 documents"


def test_short_documents_are_joined(text_rows):
    rows = text_rows(Documents(3, 2, 4))
    (batch,) = rows.micro_batches(8, 1, 2)
    assert batch.cu_seqlens.tolist() == [0, 8, 16] and rows.kind == "joined documents"
    assert batch.tokens.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 0, 0, 0, 1, 1, 2, 2]
    assert batch.labels[:8].tolist() == batch.tokens[1:9].tolist()


@pytest.mark.parametrize("logit", ["0.5", "-inf", "nan"])
def test_a_logit_that_weights_cannot_be_changed_to_is_an_error(monkeypatch, capsys, logit):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with pytest.raises(SystemExit):
        importlib.import_module("training").parse(["CONFIG.yaml", f"--logit={logit}"])
    assert f"argument --logit: must be finite and at most 0, got {logit}" in capsys.readouterr().err


def test_the_memory_is_that_of_the_timed_steps(monkeypatch):
    """Counting skipped tiles computes the attention of each layer again, which softmax does not need."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script, gib = importlib.import_module("training"), [3]
    monkeypatch.setattr(script, "on_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: max(gib) * 2**30)
    engine = SimpleNamespace(train_step=lambda *args: None)
    monkeypatch.setattr(script, "opened", lambda *args: contextlib.nullcontext((engine, None)))
    monkeypatch.setattr(script, "mean_logits", lambda model: contextlib.nullcontext([0.0]))
    monkeypatch.setattr(script, "step_seconds", lambda *args: [1.0])
    monkeypatch.setattr(script, "skipped_share", lambda *args: gib.append(5) or 0.0)
    monkeypatch.setattr(script, "model_flops", lambda *args: 1.0)
    config = SimpleNamespace(vocab_size=8, model=SimpleNamespace(recompute="none"))
    options = SimpleNamespace(tokens=128, tokens_at_once=128, kernels=0)
    contender = script.Contender("stick_breaking", "changed")
    (row,) = script.measure(options, config, contender, [128], script.RandomRows(8))
    assert row["gib"] == 3


@pytest.mark.parametrize("logits", ["dot", "euclidean"])
def test_the_mean_logit_is_that_of_all_heads_and_pairs(monkeypatch, logits):
    """Heads of trained weights differ: the product of their means is not the mean of their products."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("training")

    class Core(script.StickBreakingCoreAttention):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.scale, self.options = 0.3, SimpleNamespace(logits=logits)

        def forward(self, query, key, value):
            return query

    core = Core()
    layer = SimpleNamespace(self_attention=SimpleNamespace(core_attention=core))
    q, k = 1 + torch.randn(5, 4, 8), torch.randn(5, 2, 8) - 1
    with script.mean_logits(SimpleNamespace(decoder=SimpleNamespace(layers=[layer]))) as found:
        core(q, k, k)
    pairs = [(q[j, h], k[i, h // 2]) for h in range(4) for j in range(5) for i in range(5)]
    expected = [-((x - y) ** 2).sum() if logits == "euclidean" else x @ y for x, y in pairs]
    assert found == [pytest.approx(0.3 * torch.stack(expected).mean().item(), rel=1e-5)]
