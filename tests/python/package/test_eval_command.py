"""`megatron-sb eval` evaluates checkpoints with lm-eval on a task of this file, on RULER and on LongBench."""

import json
import math
import re
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.fork_server import run_python
from support.lm_eval_tasks import TASK

from megatron_sb import cli

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")

from megatron_sb import checkpoints, lm_evaluation  # noqa: E402
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM, byte_tokenizer  # noqa: E402
from megatron_sb.validation import InputError  # noqa: E402

TEXT_TASK = """
include: local_choices.yaml
task: local_text
output_type: generate_until
generation_kwargs: {max_gen_toks: 50, until: []}
metric_list: [{metric: exact_match}]
"""
# lm-eval's task with a data set of its own, as docs/huggingface.md describes.
PASSAGES_TASK = """
include: PASSAGES
dataset_path: json
dataset_name: null
dataset_kwargs: {data_files: {test: FILE}}
"""
TASKS = Path(lm_eval.__file__).parent / "tasks"
RULER, PASSAGES = TASKS / "ruler", TASKS / "longbench" / "passage_count.yaml"
HAS_RULER = find_spec("wonderwords") is not None and find_spec("nltk") is not None
HAS_LONGBENCH = all(find_spec(name) is not None for name in ("jieba", "fuzzywuzzy", "rouge"))
# Runs several commands in one process, without lm-eval's own 14,000 tasks, whose files take ten seconds to read. RULER
# sorts a million pairs of words, for another ten seconds, and tries to download what its essays need.
SCRIPT = """
import functools, json, sys
from lm_eval.tasks import TaskManager
from megatron_sb import cli
TaskManager.__init__ = functools.partialmethod(TaskManager.__init__, include_defaults=False)
if sys.argv[2] == "True":
    import nltk, wonderwords
    nltk.download = lambda name: False
    class FewWords(wonderwords.RandomWord):
        def __init__(self):
            super().__init__()
            self._categories = {kind: words[:50] for kind, words in self._categories.items()}
    wonderwords.RandomWord = FewWords
for command in json.loads(sys.argv[1]):
    print("STATUS", cli.main(["eval", *command]), flush=True)
"""
QUESTIONS = ("What is 2 + 2?", "A", "Which of these words is the longest one of all of them?", "Ça va?", "def f(x):")
CHOICES = (" four", " five", " a much longer answer", "½")


def small_model():
    torch.manual_seed(3)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256, "max_position_embeddings": 128}
    config = StickBreakingConfig(**sizes, **special, num_attention_heads=4, initializer_range=0.3)
    return StickBreakingForCausalLM(config).eval()


def digits_model():
    """Return a model that generates the digit 7 and spaces. Another token never has the largest logit."""
    model = small_model()
    with torch.no_grad():
        weight = model.lm_head.weight
        row = weight[ord("7")].clone()
        weight.zero_()
        weight[ord("7")], weight[ord(" ")] = row, -row
    return model


def write_passages(folder, model):
    """Write a task with two documents, whose paragraphs "A" and "B" the model is to count.

    Return the expected score: the mean of the shares of the right number among the numbers that the model generates.
    """
    prompt = re.search(r'doc_to_text: "(.*)"', PASSAGES.read_text())[1].replace("\\n", "\n")
    contexts, docs, shares = ("Paragraph 1: A\n\nParagraph 2: B", "Paragraph 1: A\n\nParagraph 2: A\n\n" * 3), [], []
    for context in contexts:
        ids = torch.tensor([list(prompt.replace("{{context}}", context).encode())])
        new = model.generate(ids, max_new_tokens=32, do_sample=False)[0, ids.shape[1] :]
        numbers = re.findall(r"\d+", bytes(new.tolist()).decode())
        right, count = Counter(numbers).most_common(1)[0]
        shares.append(count / len(numbers))
        docs.append({"context": context, "answers": ["none", right]})
    docs.append({"context": contexts[0], "answers": ["12345"]})
    (folder / "passages.jsonl").write_text("\n".join(map(json.dumps, docs)))
    text = PASSAGES_TASK.replace("PASSAGES", str(PASSAGES)).replace("FILE", str(folder / "passages.jsonl"))
    (folder / "local_passages.yaml").write_text(text)
    return sum(shares) / len(docs)


def likelihood(model, question, choice):
    """Compute log P(choice | question)."""
    question, choice = list(question.encode()), list(choice.encode())
    with torch.no_grad():
        rows = model(torch.tensor([question + choice])).logits[0, len(question) - 1 : -1].log_softmax(-1)
    return rows[range(len(choice)), choice].sum().item()


def write_task(folder, answers):
    folder.mkdir()
    docs = [
        {"question": question, "choices": CHOICES, "answer": answer}
        for question, answer in zip(QUESTIONS, answers, strict=True)
    ]
    (folder / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (folder / "local_choices.yaml").write_text(TASK.replace("FILE", str(folder / "docs.jsonl")))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The folder in which the commands ran, their output, and the share of right answers."""
    folder, model = tmp_path_factory.mktemp("evaluated"), small_model()
    model.save_pretrained(folder / "model")
    checkpoints.save(model, folder / "megatron", "megatron")
    best = [max(range(len(CHOICES)), key=lambda n: likelihood(model, text, CHOICES[n])) for text in QUESTIONS]
    write_task(folder / "tasks", [*best[:-2], *((answer + 1) % len(CHOICES) for answer in best[-2:])])
    (folder / "tasks" / "local_text.yaml").write_text(TEXT_TASK)
    (folder / "tasks" / "needs_module.yaml").write_text("task: needs_module\ncustom_dataset: !function module.load\n")
    (folder / "tasks" / "module.py").write_text("raise ImportError('pip install something')")
    (folder / "evaluate.py").write_text(SCRIPT)
    (folder / "old.json").write_text("old")
    options = ["--tasks", "local_c*", "--include-path", str(folder / "tasks"), "--device", "cpu", "--batch-size", "3"]
    config = ["--config", str(folder / "model")]
    commands = [
        ["model", *options, "--out", "new/huggingface.json"],
        ["megatron", *config, *options, "--limit", "3", "--out", "old.json", "--overwrite"],
    ]
    ruler = ["--include-path", str(RULER), "--metadata", '{"max_seq_lengths": [1024]}', "--limit", "1"]
    both = ["--tasks", "niah_single_1", "ruler_fwe"]
    commands += [
        ["megatron", *config, *both, *ruler, "--device", "cpu", "--out", "ruler.json"],
        ["model", "--tasks", "niah_single_1", "ruler_vt", *ruler],
        ["model", "--tasks", "local_text", *options[2:], "--max-length", "40"],
        ["model", "--tasks", "needs_module", *options[2:]],
    ]
    if HAS_LONGBENCH:
        model = digits_model()
        checkpoints.save(model, folder / "digits", "megatron")
        model.save_pretrained(folder / "digits_model")
        (folder / "passages").mkdir()
        (folder / "expected.json").write_text(json.dumps(write_passages(folder / "passages", model)))
        passages = ["--include-path", str(folder / "passages"), "--device", "cpu", "--max-length", "2048"]
        passages += ["--tasks", "longbench_passage_count", "--out", "passages.json"]
        commands.append(["digits", "--config", str(folder / "digits_model"), *passages])
    environment = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    arguments = [folder / "evaluate.py", json.dumps(commands), HAS_RULER]
    return folder, run_python(arguments, environment=environment, folder=folder, seconds=300)


def test_status_and_messages(evaluated):
    """Three commands name a task that cannot run, and so does RULER's without the packages that it needs."""
    _, done = evaluated
    statuses = [line for line in done.stdout.splitlines() if line.startswith("STATUS")]
    expected = [0, 0, 0 if HAS_RULER else 2, 2, 2, 2, *([0] if HAS_LONGBENCH else [])]
    assert statuses == [f"STATUS {status}" for status in expected], done.stderr[-4000:]
    messages = [line for line in done.stderr.splitlines() if line.startswith("megatron-sb: --")]
    expected = [
        "--tasks must not contain ruler_vt for a tokenizer of bytes, got 'ruler_vt'",
        "--max-length must be more than 50, the tokens that local_text generates, got 40.",
        "--tasks: needs_module cannot be loaded: pip install something",
    ]
    if not HAS_RULER:
        expected.insert(0, "--tasks: niah_single_1 cannot be loaded: Please install the `wonderwords` and `nltk`")
    for message, part in zip(messages, expected, strict=True):
        assert part in message


def test_a_hugging_face_folder_is_evaluated_as_it_is(evaluated):
    folder, done = evaluated
    results = json.loads((folder / "new" / "huggingface.json").read_text())
    assert results["results"]["local_choices"]["acc,none"] == pytest.approx(3 / 5)
    facts = results["megatron_sb"]
    assert (facts["checkpoint"], facts["format"]) == (str(folder / "model"), "huggingface")
    assert not list((folder / "model").glob("*token*"))  # the tokenizer of bytes is elsewhere
    assert facts["tokenizer"] == results["config"]["model_args"]["tokenizer"] == "bytes"
    assert "|local_choices|" in done.stdout and "0.6" in done.stdout
    assert [path.name for path in (folder / "new").iterdir()] == ["huggingface.json"]


def test_another_format_is_converted(evaluated):
    """--overwrite replaces the file. --limit takes the first three questions, which are all right."""
    folder, _ = evaluated
    text = (folder / "old.json").read_text()
    results = json.loads(text)
    assert results["results"]["local_choices"]["acc,none"] == 1
    assert results["n-samples"]["local_choices"]["effective"] == 3
    checkpoint = str(folder / "megatron" / "release")
    assert results["config"]["model_args"]["pretrained"] == results["megatron_sb"]["checkpoint"] == checkpoint
    assert results["megatron_sb"]["format"] == "megatron"
    assert "megatron-sb-eval-" not in text  # the temporary folder


@pytest.mark.skipif(not HAS_RULER, reason="needs wonderwords and nltk")
def test_ruler(evaluated):
    """The texts are generated at the length of --metadata, and lm-eval does not truncate them."""
    folder, _ = evaluated
    results = json.loads((folder / "ruler.json").read_text())
    assert results["megatron_sb"]["format"] == "megatron"
    assert results["config"]["model_args"]["max_length"] > 1024
    for task in ("niah_single_1", "ruler_fwe"):
        assert results["n-samples"][task] == {"original": 500, "effective": 1}
        assert 0 <= results["results"][task]["1024,none"] <= 1
        assert results["configs"][task]["metadata"]["tokenizer"] == "bytes"


@pytest.mark.skipif(not HAS_LONGBENCH, reason="needs jieba, fuzzywuzzy and rouge")
def test_longbench(evaluated):
    """The score is the one that the model's own greedy generation has for lm-eval's prompt."""
    folder, _ = evaluated
    results, expected = (json.loads((folder / name).read_text()) for name in ("passages.json", "expected.json"))
    found = results["results"]["longbench_passage_count"]
    assert 0 < expected < 1
    assert found["count_score,none"] == found["score,none"] == pytest.approx(expected)
    assert results["n-samples"]["longbench_passage_count"] == {"original": 3, "effective": 3}
    assert results["megatron_sb"]["format"] == "megatron"


def test_sigterm_removes_the_converted_model():
    """As at the time limit of a cluster. The folder has the size of the model."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, lm_evaluation._temporary_folder() as folder:
        (folder / "model.safetensors").touch()
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 143 and not folder.exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_numbers_that_are_not_finite_are_null(tmp_path):
    """JSON has neither NaN nor Infinity. A model whose training diverged has such results."""
    model = lm_evaluation.SavedModel(tmp_path, tmp_path, "huggingface", tmp_path, True, None)
    results = {"results": {"task": {"perplexity,none": math.inf, "acc,none": math.nan, "acc_stderr,none": 0.5}}}
    text = lm_evaluation._to_json(results, model)
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert found["results"]["task"] == {"perplexity,none": None, "acc,none": None, "acc_stderr,none": 0.5}


def refuse(arguments, capsys):
    """Run a command that must end with status 2. Return its message."""
    assert cli.main(["eval", *map(str, arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def folder(tmp_path):
    """A folder with the configuration of a model and no weights."""
    StickBreakingConfig(vocab_size=257, eos_token_id=256).save_pretrained(tmp_path / "model")
    (tmp_path / "file").write_text("kept")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "file"], "--out must be a new file, got 'file', which exists. Use --overwrite"),
        (["--out", "model", "--overwrite"], "--out must be a file, got 'model', which is a folder"),
        (["--out", "file/new.json"], "but file is a file"),
        (["--limit", "0"], "--limit must be at least 1, got 0."),
        (["--num-fewshot", "-1"], "--num-fewshot must be at least 0, got -1."),
        (["--batch-size", "0"], "--batch-size must be an integer of at least 1 or 'auto', got '0'."),
        (["--metadata", "{"], "--metadata must be a JSON object, got '{'"),
        (["--metadata", '{"max_seq_lengths": 4096}'], "max_seq_lengths in --metadata must be a list of integers"),
        (["--include-path", "nothing"], "--include-path must be a folder with task files of lm-eval, got 'nothing'."),
        (["--tokenizer", "model"], "--tokenizer must be a folder with the files of a tokenizer, got 'model'."),
    ],
)
def test_an_option_that_cannot_be_used(options, message, folder, monkeypatch, capsys):
    """The error comes before the checkpoint is looked for."""
    monkeypatch.chdir(folder)
    assert message in refuse(["nothing", "--tasks", "local_choices", *options], capsys)
    assert (folder / "file").read_text() == "kept"


def test_no_such_checkpoint(folder, capsys):
    message = refuse([folder / "nothing", "--tasks", "local_choices"], capsys)
    path = repr(str(folder / "nothing"))
    assert f"must be the folder of a checkpoint or a run, got {path}, which does not exist." in message


def test_lm_eval_is_missing(folder, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("lm_eval.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    message = refuse([folder / "model", "--tasks", "local_choices"], capsys)
    assert "eval needs the module lm_eval, which is not installed: pip install 'lm-eval[hf]'" in message


class Tasks:
    """Stands for lm-eval's TaskManager with one task."""

    all_tasks = ("hellaswag",)

    def match_tasks(self, patterns):
        return [name for name in self.all_tasks if name in patterns]


def test_an_unknown_task(folder, monkeypatch, capsys):
    """The error comes before the weights are looked for, which this folder lacks."""
    monkeypatch.setattr(lm_evaluation, "_check_lm_eval", lambda: None)
    monkeypatch.setattr(lm_evaluation, "_task_manager", lambda include_path, metadata: Tasks())
    message = refuse([folder / "model", "--tasks", "hellaswag", "helaswag"], capsys)
    assert "--tasks must name tasks of lm-eval or of a folder of --include-path, got 'helaswag'." in message
    assert "Similar names: hellaswag." in message
    assert "model has no *.safetensors file" in refuse([folder / "model", "--tasks", "hellaswag"], capsys)
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert "model has no *.safetensors and no *.bin" in refuse([folder / "model", "--tasks", "hellaswag"], capsys)


class CommonWords:
    """Stands for ruler_cwe with one text of each length."""

    task_name = "ruler_cwe"

    def get_config(self, key):
        return {"output_type": "generate_until", "generation_kwargs": {"max_gen_toks": 120}}[key]

    def test_docs(self):
        return [{"max_length": 8192, "outputs": ["word"]}, {"max_length": 4096, "outputs": []}]


def test_texts_without_words():
    """lm-eval would divide by the number of words, 0, after the model has run."""
    with pytest.raises(ValueError, match=r"max_seq_lengths in --metadata must have room for .*, got 4096"):
        lm_evaluation._check_task(CommonWords(), 8192)


class ChosenAnswers:
    """Stands for a task with three examples. `split` is where the examples of the prompts come from."""

    task_name = "answers"

    def __init__(self, split=None, num_fewshot=None, **attributes):
        self.config = {"output_type": "multiple_choice", "test_split": "test", "num_fewshot": num_fewshot}
        self.fewshot_cfg = SimpleNamespace(split=split)
        vars(self).update(attributes)

    def get_config(self, key):
        return self.config[key]

    def fewshot_docs(self):
        return iter("abc")


@pytest.mark.parametrize(("split", "most"), [(None, 3), ("train", 3), ("test", 2)])
def test_more_examples_in_a_prompt_than_a_task_has(split, most):
    """A tested example is not in its own prompt."""
    lm_evaluation._check_num_fewshot(ChosenAnswers(split), most)
    lm_evaluation._check_num_fewshot(ChosenAnswers(split, num_fewshot=0), 9)
    with pytest.raises(InputError, match=f"--num-fewshot must be at most {most}, .* answers, got {most + 1}"):
        lm_evaluation._check_num_fewshot(ChosenAnswers(split), most + 1)


@pytest.mark.parametrize("attribute", ["UNSAFE_CODE", "MULTIMODAL"])
def test_tasks_that_lm_eval_would_refuse(attribute):
    """lm-eval refuses them with a traceback, after all tasks are loaded."""
    task = ChosenAnswers(**{attribute: True})
    manager = SimpleNamespace(load=lambda names: {"tasks": {"answers": task}, "groups": {}})
    with pytest.raises(InputError, match=r"--tasks must not contain .*'answers'"):
        lm_evaluation._load_tasks(manager, ["answers"], 64)
    vars(task)[attribute] = False
    assert lm_evaluation._load_tasks(manager, ["answers"], 64, 2) == [task]
    with pytest.raises(InputError, match="--num-fewshot must be at most 3"):
        lm_evaluation._load_tasks(manager, ["answers"], 64, 4)


@pytest.mark.parametrize("error", [StopIteration(), IndexError("Invalid key: 0 is out of bounds for size 0")], ids=repr)
def test_a_task_without_examples(error):
    """The errors are those of an empty file, and of a task whose process_docs keeps nothing. They were tracebacks."""

    def load(names):
        raise error

    with pytest.raises(InputError, match="--tasks: answers must have at least one example in its data set, got none"):
        lm_evaluation._load_tasks(SimpleNamespace(load=load), ["answers"], 64)


def choose(folder, given=None, **fields):
    config = StickBreakingConfig(**fields)
    return lm_evaluation._choose_tokenizer(given, folder, config, folder / "new")


def test_the_tokenizer(tmp_path):
    """The one of bytes is written only for a model of bytes without one. Another one must fit the vocabulary."""
    with pytest.raises(ValueError, match="--tokenizer must be the folder of the model's tokenizer"):
        choose(tmp_path, vocab_size=32000, eos_token_id=256)
    with pytest.raises(ValueError, match="--tokenizer must be the folder of the model's tokenizer"):
        choose(tmp_path, vocab_size=257, eos_token_id=0)
    assert choose(tmp_path, vocab_size=384, eos_token_id=256) == (tmp_path / "new", True)
    assert lm_evaluation._has_tokenizer(tmp_path / "new")
    byte_tokenizer().save_pretrained(tmp_path / "own")
    assert choose(tmp_path, str(tmp_path / "own"), vocab_size=32000) == (tmp_path / "own", True)
    with pytest.raises(ValueError, match=r"--tokenizer must have at most 256 tokens, .*, got 257 in"):
        choose(tmp_path, str(tmp_path / "own"), vocab_size=256)


def test_the_max_length():
    """RULER's texts are not truncated. They are longer than max_seq_lengths by the begin of the answer."""
    config = StickBreakingConfig(max_position_embeddings=2048)
    assert lm_evaluation._max_length(None, {}, config) == 2048
    assert lm_evaluation._max_length(None, {"max_seq_lengths": [1024, 4096]}, config) > 4096
    assert lm_evaluation._max_length(300, {}, config) == 300
    with pytest.raises(ValueError, match="--max-length must be at least 4096, the largest of max_seq_lengths, got 300"):
        lm_evaluation._max_length(300, {"max_seq_lengths": [1024, 4096]}, config)
