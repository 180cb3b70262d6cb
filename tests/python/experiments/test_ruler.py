"""RULER's tasks: samples that can be solved from the prompt, rows of tasks for training, scores and the command."""

import ast
import gc
import json
import re
from collections import Counter

import numpy as np
import pytest
import torch
from support.markdown import tables_of
from support.sweeps import forked_runs

from megatron_sb import cli
from megatron_sb.experiments import needles, ruler
from megatron_sb.training.config import ConfigError, load_config
from megatron_sb.training.data import rows_ahead
from megatron_sb.training.task import load_task

NEEDLE = r"The secret (number|code) of (\S+) is: (\S+)\."


def read_needles(prompt):
    """Return the values of every key, in the order of the text, and the keys that the question asks for."""
    text, asked = re.match(r"(?s)(.*)What (?:is|are all) the secret (?:number|code)s? of (.*?)\?", prompt).groups()
    values_by_key = {}
    for _, key, value in re.findall(NEEDLE, text):
        values_by_key.setdefault(key, []).append(value)
    return values_by_key, asked.split(", ")


def solve_needles(prompt):
    values_by_key, asked = read_needles(prompt)
    return [value for key in asked for value in values_by_key[key]]


def solve_tracking(prompt):
    variables = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", prompt):
        variables[name] = variables.get(source, source)
    (asked,) = re.findall(r"hold the value (\d+)\?", prompt)
    return [name for name, value in variables.items() if value == asked]


def most_frequent(prompt, count):
    """Return the `count` most frequent words. Fail on a tie with the next word."""
    counts = [*Counter(prompt[: prompt.index(".")].split()).most_common(count + 1), ("no other", 0)]
    assert counts[count - 1][1] > counts[count][1]
    return [word for word, _ in counts[:count]]


def solve_question(prompt):
    owners = dict(re.findall(r"(?m)^Method (\w+) belongs to the class (\w+):", prompt))
    bases = dict(re.findall(r"(?m)^Class (\w+) is derived from the class (\w+)\.", prompt))
    ((name, hops),) = re.findall(r"method (\w+) (belong\?|is derived)", prompt)
    return [owners[name] if hops == "belong?" else bases[owners[name]]]


SOLVERS = {
    **dict.fromkeys([*ruler.GROUPS["one needle"], *ruler.GROUPS["several needles"]], solve_needles),
    "tracking": solve_tracking,
    "common_words": lambda prompt: sorted(most_frequent(prompt, 10)),
    "frequent_words": lambda prompt: most_frequent(prompt, 3),
    "question": solve_question,
    "question_2": solve_question,
}


@pytest.mark.parametrize("task", ruler.TASKS)
def test_solvers_find_every_answer(task):
    prompts = set()
    for length in (1200, 20_000):
        for sample in needles.samples_of(task, length, 6):
            assert list(sample.answers) == SOLVERS[task](sample.prompt)
            assert 0.9 * length - 210 < sample.num_bytes <= length and sample.prompt.isascii()
            prompts.add(sample.prompt)
    assert len(prompts) == 12, "some samples are equal"
    assert needles.samples_of(task, 1200, 2) == needles.samples_of(task, 1200, 6)[:2]
    with pytest.raises(ValueError, match=rf"--tasks {task}: length must .*got 90"):
        needles.samples_of(task, 90, 1)


def test_there_are_thirteen_tasks():
    assert len(ruler.TASKS) == 13
    assert sorted(task for tasks in ruler.GROUPS.values() for task in tasks) == sorted(ruler.TASKS)


def test_kinds_of_needles_and_haystacks():
    def sample(task):
        return needles.samples_of(task, 4000, 3)[2]

    noise, texts = "Nobody came along the road.", ruler.load_texts()
    assert sample("single_1").prompt.count(noise) > 10 and noise not in sample("single_2").prompt
    assert sum(sentence in sample("single_2").prompt for sentence in texts.sentences) > 10
    uuid = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    assert re.fullmatch(uuid, sample("single_3").answers[0]) and re.fullmatch(r"\d{7}", sample("single_2").answers[0])
    for task, least, most in (("single_2", 1, 1), ("multikey_1", 4, 4), ("multikey_2", 60, 99), ("multikey_3", 30, 50)):
        values_by_key, (asked,) = read_needles(sample(task).prompt)
        assert least <= len(values_by_key) <= most and [*values_by_key].count(asked) == 1
    places = [sample.prompt.index("The secret") / 4000 for sample in needles.samples_of("single_2", 4000, 40)]
    assert min(places) < 0.2 and max(places) > 0.75, "needles should be anywhere in the text"
    assert len(sample("multivalue").answers) == len(sample("multiquery").answers) == 4
    assert len(sample("tracking").answers) == 5


class Oracle:
    """A model that predicts every label except those at the positions `wrong` of each sequence."""

    def __init__(self, wrong):
        self.wrong = wrong

    def likeliest_tokens(self, batch):
        tokens = batch.labels.copy()
        for begin in batch.cu_seqlens[:-1]:
            tokens[begin + np.array(self.wrong, dtype=int)] += 1
        return torch.from_numpy(tokens)


def test_an_answer_is_right_if_all_bytes_are():
    samples = [ruler.Sample("No. ", "What? ", ("abc", "de")), ruler.Sample("", "Which? It is: ", ("f",))]
    batch, spans = ruler.encode(samples[0])
    text = bytes(batch.tokens.astype(np.uint8)).decode()
    assert text == "No. What? abc, d" and bytes(batch.labels.astype(np.uint8)).decode() == "o. What? abc, de"
    assert [bytes(batch.labels[first:last].astype(np.uint8)) for first, last in spans] == [b"abc", b"de"]
    assert bytes(batch.labels[batch.counted].astype(np.uint8)) == b"What? abc, de"
    (alone, _), whole = ruler.encode(samples[1]), b"hich? It is: f"
    assert bytes(alone.labels[alone.counted].astype(np.uint8)) == whole
    right = needles.scores(Oracle([]), samples, 16)
    assert (right["accuracy"], right["bytes"], right["samples"]) == (1, 1, 2)
    # Position 10 is the b of an answer in the first sample, and a letter of the question in the second.
    one_wrong = needles.scores(Oracle([10]), samples, 10_000)
    assert one_wrong["accuracy"] == pytest.approx((0.5 + 1) / 2) and one_wrong["bytes"] == pytest.approx((0.8 + 1) / 2)
    between = needles.scores(Oracle([12, 13]), samples[:1], 16)  # the separator between answers is not scored
    assert between["accuracy"] == 1


def test_table_and_picture(tmp_path):
    results = [
        {"model": model, "task": task, "length": length, "accuracy": accuracy, "bytes": 0.5}
        for model in ("a", "b")
        for task, accuracy in (("single_1", 1.0), ("tracking", 0.5))
        for length in (512, 1024)
    ]
    needles.write(tmp_path, {"a": "A", "b": "B"}, results, "a CPU")
    (table,) = tables_of((tmp_path / "table.md").read_text())
    assert ["single_1", "512", "100.0%", "50.0%", "100.0%", "50.0%"] in table
    assert ["mean", "1024", "75.0%", "50.0%", "75.0%", "50.0%"] in table
    assert (tmp_path / "picture.png").stat().st_size > 1000


SMALL = "configs/needles_small.yaml"
SOLVED_BY = {  # words of the question -> solver
    "the secret ": solve_needles,
    "hold the value ": solve_tracking,
    "most common words are: ": SOLVERS["common_words"],
    "most frequent words, ": SOLVERS["frequent_words"],
    "the method ": solve_question,
}


def mixed(request, fraction=0.75, *overrides):
    """Return the stage and a sampler with this fraction of task rows."""
    small = [
        f"data.paths=[{request.config.rootpath / 'megatron_sb'}]",
        "evaluation.target_tokens=64",
        "stages.0.context_length=1024",
    ]
    config = load_config(request.config.rootpath / SMALL, [*small, f"data.ruler_fraction={fraction}", *overrides])
    (stage,) = config.stages
    return stage, load_task(config).sampler(stage, 0)


def read_samples(batch):
    """Yield the text of each sequence of a row, and the text of its counted labels."""
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        labels = batch.labels[begin:end]
        padding = (labels == 256).sum()
        text = bytes([batch.tokens[begin], *labels[: len(labels) - padding]]).decode()
        yield text, bytes(labels[batch.counted[begin:end]].astype(np.uint8)).decode()


def test_rows_of_tasks_among_rows_of_text(request):
    """Three of four rows hold tasks. All tasks and sample counts occur, and only questions and answers are counted."""
    stage, sampler = mixed(request)
    rows = sampler.next_rows(240)
    batches = [sampler.read(row) for row in rows]
    assert [row.num_tokens for row in rows] == [batch.counted.sum() for batch in batches]
    assert all((row.cu_seqlens == batch.cu_seqlens).all() for row, batch in zip(rows, batches, strict=True))
    is_task_row = [isinstance(row, ruler.TaskRow) for row in rows]
    assert is_task_row == [False, True, True, True] * 60
    counts, kinds = Counter(), Counter()
    for batch in (batch for batch, is_task in zip(batches, is_task_row, strict=True) if is_task):
        samples = [*read_samples(batch)]
        counts[len(samples)] += 1
        for text, counted in samples:
            solve = next(solver for words, solver in SOLVED_BY.items() if words in text)
            answers = solve(text)
            assert text.endswith(counted) and counted.endswith(", ".join(answers))
            assert counted.startswith(("What ", "Which ", "To which ", "The class of the method "))
            assert len(text) <= stage.context_length // len(samples)
            kinds[solve] += 1
    assert set(counts) == {1, 2, 4} and min(counts.values()) > 20
    assert len(kinds) == len(set(SOLVED_BY.values()))


def test_evaluation_asks_about_other_classes_than_training():
    texts = ruler.load_texts()
    trained, held_out = texts.select_questions(held_out=False), texts.select_questions(held_out=True)
    assert trained.asked | held_out.asked == texts.asked and not trained.asked & held_out.asked
    assert 0.15 < len(held_out.asked) / len(texts.asked) < 0.35
    owners = {method.name: method.owner for method in texts.methods}
    for task in ruler.GROUPS["questions"]:
        for sample in needles.samples_of(task, 1200, 20):
            assert owners[re.search(r"method (\w+) (?:belong\?|is derived)", sample.prompt)[1]] in held_out.asked


@pytest.mark.parametrize("packing", ["per_document", "whole_stream"])
def test_mixed_rows_are_padded_for_context_parallelism(packing, request):
    ranks = ["parallel.ranks=4", "stages.0.context_parallel_size=4", f"parallel.packing={packing}"]
    _, sampler = mixed(request, 0.75, *ranks)
    rows = sampler.next_rows(40)
    batches = [sampler.read(row) for row in rows]
    assert all(len(batch.tokens) % 8 == 0 for batch in batches)
    assert packing == "whole_stream" or all((batch.cu_seqlens % 8 == 0).all() for batch in batches)
    task_batches = [row.batch for row in rows if isinstance(row, ruler.TaskRow)]
    assert len(task_batches) == 30 and all((batch.labels[batch.counted] < 256).all() for batch in task_batches)


def test_mixed_rows_resume(request):
    _, straight = mixed(request)
    _, again = mixed(request)
    _, resumed = mixed(request)
    rows = [straight.read(row) for row in straight.next_rows(16)]
    resumed.load_state_dict(next(rows_ahead(again, 5, 2, group=0, num_groups=1, rows_per_micro_batch=5)).sampler)
    after = [resumed.read(row) for row in resumed.next_rows(11)]
    for expected, row in zip(rows[5:], after, strict=True):
        assert all((getattr(expected, name) == getattr(row, name)).all() for name in ("tokens", "labels", "counted"))


def test_stages_of_mixed_rows_share_out_the_documents(request, tmp_path):
    """The rows of tasks use no documents: two stages with half of an epoch's text each read nearly all documents."""
    generator = np.random.default_rng(0)
    for index in range(80):
        (tmp_path / f"{index}.txt").write_bytes(generator.integers(97, 123, 2048, dtype=np.uint8).tobytes())
    text_rows = 60  # of a stage: less than half of 80 * 0.9 * 2 rows of 1024
    stage = {"context_length": 1024, "rows_per_step": 1, "steps": 2 * text_rows, "learning_rate": 1e-3}
    stages = json.dumps([stage | {"name": name} for name in ("a", "b")])
    overrides = [f"data.paths=[{tmp_path}]", f"stages={stages}", "evaluation={target_tokens: 16, longest: 64}"]
    config = load_config(request.config.rootpath / SMALL, ["data.ruler_fraction=0.5", *overrides])
    task, found = load_task(config), []
    for index, of_stage in enumerate(config.stages):
        rows = task.sampler(of_stage, index).next_rows(of_stage.steps)
        found.append({document for row in rows for document, _, _ in row.parts})
    assert not found[0] & found[1]
    assert min(map(len, found)) >= text_rows / 2 and len(found[0]) <= text_rows / 2 + 2, "consecutive documents"


def test_invalid_fractions(request):
    for override, message in {
        "data.ruler_fraction=1.0": r"data\.ruler_fraction.*1\.0",
        "stages.0.context_length=1000": r"context_length must be at least 1024 .*0\.5.*got 1000",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(request.config.rootpath / SMALL, ["data.ruler_fraction=0.5", override])
    with pytest.raises(ConfigError, match=r"data\.ruler_fraction.*0\.5.*recall"):
        load_config(request.config.rootpath / "configs" / "mqrar_small.yaml", ["data.ruler_fraction=0.5"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["configs/mqrar_small.yaml"], "data.kind must be 'text' .*got 'recall'"),
        (["configs/needles_small.yaml", "--samples", "0"], "--samples must be at least 1, .*and 0"),
        (["configs/needles_small.yaml", "--lengths", "50"], "--tasks single_1: length must .*got 50"),
    ],
)
def test_invalid_options(options, message, request, capsys):
    config, *rest = options
    assert cli.main(["experiment", "needles", str(request.config.rootpath / config), *rest]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_the_standard_library_has_enough_text():
    texts = ruler.load_texts()
    assert len(texts.sentences) > 5000 and len(texts.words) > 2000 and len(texts.methods) > 500
    assert len(texts.bases) > 200 and set(texts.words).isdisjoint(["Python"])


def test_the_command(tmp_path, request):
    """The command scores an almost untrained model on the chosen tasks and lengths. It reuses a finished run."""
    tiny = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.num_kv_heads=2"]
    tiny += ["model.ffn_hidden_size=32", "stages.0.steps=2", "stages.0.warmup_steps=1", "stages.0.context_length=64"]
    tiny += ["compare=[stick_breaking]", "evaluation={windows: 1, target_tokens: 16, length_factor: 4}"]
    command = ["experiment", "needles", str(request.config.rootpath / SMALL), "--out", str(tmp_path / "out")]
    command += [word for override in tiny for word in ("--set", override)]
    command += ["--lengths", "1024", "1536", "--samples", "2", "--tasks", "tracking", "question"]
    with forked_runs():
        assert cli.main(command) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    scored = [(entry["model"], entry["task"], entry["length"]) for entry in results["scores"]]
    assert scored == [("stick_breaking", task, length) for task in ("tracking", "question") for length in (1024, 1536)]
    assert all(entry["samples"] == 2 and 0 <= entry["bytes"] < 0.5 for entry in results["scores"])
    ((_, *rows),) = tables_of((tmp_path / "out" / "table.md").read_text())
    tasks = ("tracking", "question", "mean")
    assert [row[:2] for row in rows] == [[task, length] for task in tasks for length in ("1024", "1536")]
    assert (tmp_path / "out" / "picture.png").stat().st_size > 1000
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trained").iterdir()}
    again = [
        "experiment",
        "needles",
        str(tmp_path / "out" / "trained" / "config.yaml"),
        "--out",
        str(tmp_path / "again"),
    ]
    assert cli.main([*again, *command[-8:]]) == 0
    assert json.loads((tmp_path / "again" / "results.json").read_text())["scores"] == results["scores"]
    assert written == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trained").iterdir()}


def test_data_sets_of_bytes_can_be_mixed_with_tasks_and_measured(request):
    """RULER's tasks are bytes, so the data set must be too."""
    path = request.config.rootpath / SMALL
    data = "data={kind: indexed, paths: [a], vocab_size: %d, end_of_document: 256, ruler_samples: 2, %s}"
    evaluation = "evaluation={target_tokens: 256, length_factor: 4}"
    context = "stages.0.context_length=1024"
    config = load_config(path, [data % (257, "ruler_length_factor: 2"), evaluation, context])
    assert config.data.ruler_lengths(config, config.stages[0]) == [1024, 2048]
    for overrides, message in {
        (data % (300, "ruler_fraction: 0.5"), evaluation, context): "must be 257 and 256 .* got 300 and 256",
        (data % (257, ""), evaluation, context, "parallel.ranks=2"): r"parallel\.ranks must be 1 .* got 2",
        (data % (257, ""), evaluation, "stages.0.context_length=512"): "must be at least 1024 for RULER's tasks",
        (data % (257, ""), "evaluation={target_tokens: 256, longest: 512}", context): (
            r"ruler_samples = 2 needs an evaluated length from .*context_length = 1024 to .*16384, got \[256, 512\]"
        ),
        (data % (257, "ruler_length_factor: 1"), "evaluation={target_tokens: 300}", context): (
            r"from stages\.0\.context_length = 1024 to .* 1024, got \[300, 600, 1200, .*\]"
        ),
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(path, overrides)


class Guesses:
    """An engine whose model always predicts the same byte with the same loss."""

    data_parallel_rank, data_parallel_size = 0, 1

    def __init__(self):
        self.scalings = []

    def scale_positions(self, kind, factor):
        self.scalings.append((kind, factor))

    def likeliest_tokens(self, batch):
        return torch.full((len(batch.tokens),), ord("1"))

    def window_losses(self, batch, num_windows):
        counted = torch.from_numpy(batch.counted).double()
        return torch.stack([part.sum() for part in counted.chunk(num_windows)])

    def sum_over_ranks(self, values):
        return values


def test_an_evaluation_measures_the_tasks_and_the_positions(request):
    small = [f"data.paths=[{request.config.rootpath / 'megatron_sb'}]", "stages.0.context_length=1024"]
    small += ["data.ruler_samples=2", "data.ruler_length_factor=2", "evaluation.positions=true"]
    small += ["evaluation.target_tokens=256", "evaluation.length_factor=4", "evaluation.windows=3"]
    config, engine = load_config(request.config.rootpath / SMALL, small), Guesses()
    results = load_task(config).evaluate(engine, config.stages[0], "none")
    assert [entry["context"] for entry in results] == [256, 512, 1024, 2048, 4096]
    assert [entry["context"] for entry in results if "ruler" in entry] == [1024, 2048]
    for scores in (entry["ruler"] for entry in results if "ruler" in entry):
        assert list(scores) == list(ruler.TASKS) and all(score["samples"] == 2 for score in scores.values())
        assert max(score["accuracy"] for score in scores.values()) == 0, "no answer is only the digit 1"
        assert 0 < max(score["bytes"] for score in scores.values()) < 1, "some answers have the digit 1"
    (positions,) = [entry["by_position"] for entry in results if "by_position" in entry]
    assert [(p["begin"], p["end"]) for p in positions] == [(0, 16), *((2**i, 2**i * 2) for i in range(4, 10))]
    assert all(p["nll"] == 1 and p["standard_error"] == 0 for p in positions), "each token has a loss of 1"
    assert engine.scalings[-1] == ("none", 1.0) and ("none", 2.0) in engine.scalings


def test_garbage_is_not_collected_while_the_texts_are_parsed(monkeypatch):
    """With torch loaded, the collections took two thirds of the time."""
    parse, collected = ast.parse, []

    def watched(source):
        collected.append(gc.isenabled())
        return parse(source)

    monkeypatch.setattr(ast, "parse", watched)
    assert ruler.load_texts.__wrapped__() == ruler.load_texts()
    assert len(collected) > 100 and not any(collected[:100]) and gc.isenabled()
