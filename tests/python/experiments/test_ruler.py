"""RULER's tasks: every answer found again in the text by a solver that reads nothing but the prompt."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_sb import cli
from megatron_sb.experiments import needles, ruler

NEEDLE = r"The secret (number|code) of (\S+) is: (\S+)\."


def read_needles(prompt):
    """Keys to their values, in the order of the text, and the keys that the question is about."""
    text, asked = re.match(r"(?s)(.*)What (?:is|are all) the secret (?:number|code)s? of (.*?)\?", prompt).groups()
    held = {}
    for _, key, value in re.findall(NEEDLE, text):
        held.setdefault(key, []).append(value)
    return held, asked.split(", ")


def solve_needles(prompt):
    held, asked = read_needles(prompt)
    return [value for key in asked for value in held[key]]


def solve_tracking(prompt):
    holds = {}
    for name, source in re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", prompt):
        holds[name] = holds.get(source, source)
    (asked,) = re.findall(r"hold the value (\d+)\?", prompt)
    return [name for name, value in holds.items() if value == asked]


def most_frequent(prompt, count):
    """Words, the most frequent first; it must be clear which they are."""
    counts = Counter(prompt[: prompt.index(".")].split()).most_common(count + 1)
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
def test_answers_are_in_the_text_and_nowhere_twice(task):
    prompts = set()
    for length in (1200, 20_000):
        for sample in needles.samples_of(task, length, 6):
            assert list(sample.answers) == SOLVERS[task](sample.prompt)
            assert 0.9 * length - 210 < sample.num_bytes <= length and sample.prompt.isascii()
            prompts.add(sample.prompt)
    assert len(prompts) == 12, "every sample is another one"
    assert needles.samples_of(task, 1200, 2) == needles.samples_of(task, 1200, 6)[:2]
    with pytest.raises(ValueError, match=rf"--tasks {task}: length is 90; "):
        needles.samples_of(task, 90, 1)


def test_there_are_thirteen():
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
        held, (asked,) = read_needles(sample(task).prompt)
        assert least <= len(held) <= most and [*held].count(asked) == 1
    places = [sample.prompt.index("The secret") / 4000 for sample in needles.samples_of("single_2", 4000, 40)]
    assert min(places) < 0.2 and max(places) > 0.75, "anywhere in the text"
    assert len(sample("multivalue").answers) == len(sample("multiquery").answers) == 4
    assert len(sample("tracking").answers) == 5


class Oracle:
    """Knows the batch's labels, but gets the tokens wrong that are at `wrong` places of each sequence."""

    def __init__(self, wrong):
        self.wrong = wrong

    def likeliest_tokens(self, batch):
        tokens = batch.labels.copy()
        for begin in batch.cu_seqlens[:-1]:
            tokens[begin + np.array(self.wrong, dtype=int)] += 1
        return torch.from_numpy(tokens)


def test_an_answer_is_right_as_a_whole():
    samples = [ruler.Sample("What? ", ("abc", "de")), ruler.Sample("Which? It is: ", ("f",))]
    batch, spans = needles.encoded(samples[0])
    text = bytes(batch.tokens.astype(np.uint8)).decode()
    assert text == "What? abc, d" and bytes(batch.labels.astype(np.uint8)).decode() == "hat? abc, de"
    assert [bytes(batch.labels[first:last].astype(np.uint8)) for first, last in spans] == [b"abc", b"de"]
    right = needles.scores(Oracle([]), samples, 16)
    assert (right["accuracy"], right["bytes"], right["samples"]) == (1, 1, 2)
    one_wrong = needles.scores(Oracle([6]), samples, 10_000)  # the b of the first, a letter of the other's question
    assert one_wrong["accuracy"] == pytest.approx((0.5 + 1) / 2) and one_wrong["bytes"] == pytest.approx((0.8 + 1) / 2)
    between = needles.scores(Oracle([8, 9]), samples[:1], 16)  # what stands between answers is not asked for
    assert between["accuracy"] == 1


def test_table_and_picture(tmp_path):
    found = [
        {"model": model, "task": task, "length": length, "accuracy": accuracy, "bytes": 0.5}
        for model in ("a", "b")
        for task, accuracy in (("single_1", 1.0), ("tracking", 0.5))
        for length in (512, 1024)
    ]
    needles.write(tmp_path, {"a": "A", "b": "B"}, found)
    table = (tmp_path / "table.md").read_text()
    assert "| single_1 | 512 | 100.0% | 50.0% | 100.0% | 50.0% |\n" in table
    assert "| mean | 1024 | 75.0% | 50.0% | 75.0% | 50.0% |\n" in table
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["configs/mqrar_small.yaml"], "data.kind is 'recall'; needles needs 'text'"),
        (["configs/needles_small.yaml", "--samples", "0"], "--samples is 0; 1 or more"),
        (["configs/needles_small.yaml", "--lengths", "50"], "--tasks single_1: length is 50; "),
    ],
)
def test_refused_before_anything_runs(options, message, request, capsys):
    config, *rest = options
    assert cli.main(["experiment", "needles", str(request.config.rootpath / config), *rest]) == 2
    assert message in capsys.readouterr().err


def test_texts_are_there():
    texts = ruler.load_texts()
    assert len(texts.sentences) > 5000 and len(texts.words) > 2000 and len(texts.methods) > 500
    assert len(texts.bases) > 200 and set(texts.words).isdisjoint(["Python"])
