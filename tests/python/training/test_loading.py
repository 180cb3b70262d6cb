"""Models of a run, loaded into this process, compute what the run's own evaluation recorded. They generate text."""

import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from support.jobs import SMALL_JOB, train
from support.likelihoods import nll_of_windows
from support.messages import mentions

from megatron_sb import checkpoints, cli, generation
from megatron_sb.megatron.integrity import CheckpointError
from megatron_sb.training import load_run
from megatron_sb.training.checkpoint import load
from megatron_sb.training.config import load_config
from megatron_sb.training.engine.backends import MegatronBackend
from megatron_sb.validation import InputError

STEPS = ["parallel.ranks=1", "report.tensorboard=false", "evaluation.windows=2", "evaluation.length_factor=2"]
STEPS += [
    "attention.softmax_rope.evaluated_scalings=[none]",
    "attention.gated={kind: stick_breaking, forget_gate: true, logits: euclidean}",
]
STEPS += ["model.init_std=0.1"]  # With large weights, gates and distances between queries and keys matter.
STEPS += ["attention.dropping={kind: softmax, dropped_in: extended}"]
STEPS += ["compare=[stick_breaking, softmax_rope, gated, dropping]", "attention.stick_breaking.remainder_bias=true"]
STEPS += [f"stages.{n}.{field}" for n in (0, 1) for field in ("context_parallel_size=1", "steps=5", "rows_per_step=2")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a stick-breaking model, two softmax models, and a model with forget gates and Euclidean logits."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(SMALL_JOB)
    status, _, errors = train(folder / "small.yaml", *STEPS, "--out", folder / "run")
    assert status == 0, errors
    return folder / "run"


@pytest.mark.parametrize("name", ["stick_breaking", "softmax_rope", "gated", "dropping"])
def test_likelihoods_are_those_of_the_evaluation(run, name):
    assert_likelihoods(run, name, "extended")


def test_positions_of_a_run_that_has_not_dropped_them_yet(run, tmp_path):
    """The newest checkpoint is that of the stage before."""
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "dropping" / "checkpoints" / "latest").write_text("short-000005")
    assert_likelihoods(tmp_path / "run", "dropping", "short")


def assert_likelihoods(run, name, stage):
    config = load_config(run / "config.yaml")
    evaluation = json.loads((run / "evaluation" / f"{name}.{stage}.json").read_text())
    entry = evaluation["results"][-2]  # within the trained context
    with load_run(run, name) as model:
        assert model.name == name and model.checkpoint.name == f"{stage}-000005" and config.vocab_size == 257
        assert nll_of_windows(model, config, entry["context"]) == pytest.approx(entry["nll"], rel=1e-5)


@pytest.mark.parametrize("tokens", [[], [257], [-1, 3], [[1, 2]], [1.5], "ab", None, [True], [2**70]], ids=str)
def test_tokens_that_are_no_tokens_are_an_error(run, tokens):
    with load_run(run) as model, pytest.raises(ValueError, match=mentions("tokens 0 256")):
        model.logits(tokens)


def test_one_model_is_loaded_at_a_time(run):
    with load_run(run) as model:
        with pytest.raises(InputError, match="must not have a default process group"), load_run(run):
            pass
        assert model.logits(torch.tensor([1, 2])).shape == (2, 257)


class OnGpus:
    """Loads weights as an engine on GPUs does. Megatron-Core also reads its own checkpoints on a CPU."""

    def __init__(self, engine):
        self.model = engine._model

    def load(self, path):
        MegatronBackend.load_weights(self.model, path)


def test_gpus_refuse_a_checkpoint_of_cpus(run):
    """As of a run with more ranks than GPUs. Megatron-Core raises a class of its own."""
    with load_run(run, device="cpu") as model:
        on_gpus = OnGpus(model.engine)
        with pytest.raises(CheckpointError, match=r"cannot be loaded: .* was saved on CPUs\. .*=cpu"):
            load(on_gpus, model.checkpoint)


def test_cpus_refuse_a_converted_checkpoint(run, tmp_path):
    """It has Megatron-Core's format, which only jobs on GPUs read."""
    checkpoints.save(checkpoints.load(run / "stick_breaking"), tmp_path / "out", "megatron")
    with load_run(run, device="cpu") as model, pytest.raises(CheckpointError, match=r"converted for Megatron-Core\."):
        load(model.engine, tmp_path / "out" / "release")


@pytest.mark.parametrize("name", ["stick_breaking", "gated"])
def test_the_cache_changes_no_token(run, name):
    """The transformers model with its KV cache has the logits of the engine, which has no cache."""
    config, prompt = load_config(run / "config.yaml"), list(b"import json")
    options = {"num_tokens": 40, "temperature": 0.0, "seed": 0, "end": 256}
    found = []
    with generation.open_model(run, name, config, "cpu") as (next_logits, about):

        def kept_logits(new):
            found.append(next_logits(new))
            return found[-1]

        cached = list(generation.generate(kept_logits, prompt, **options))
    assert "with a KV cache" in about
    with load_run(run, name, "cpu") as model:
        expected = model.logits(prompt + cached[:-1])[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(found), expected, atol=2e-5, rtol=1e-5)
    assert len(cached) == 40


def generated(capsys, run, *options):
    assert cli.main(["generate", str(run), "--prompt", "é: def ", "--tokens", "12", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("é: def ") and printed.out.endswith("\n")
    return printed.out, printed.err


def test_the_command(run, capsys):
    """The seed decides the text. Standard error says whether there is a KV cache."""
    first, about = generated(capsys, run, "--temperature", "1")
    assert "stick_breaking/checkpoints/extended-000005, with a KV cache" in about
    assert generated(capsys, run, "--temperature", "1")[0] == first
    assert generated(capsys, run, "--temperature", "1", "--seed", "1")[0] != first
    assert len(first) > len("é: def \n")
    for name, cache in (("softmax_rope", "no KV cache"), ("gated", "with a KV cache")):
        _, about = generated(capsys, run, "--model", name)
        assert f"{name}/checkpoints/extended-000005, {cache}" in about


def test_generation_stops_at_the_end_of_a_document():
    asked = []

    def next_logits(new):
        asked.append(list(new))
        return torch.nn.functional.one_hot(torch.tensor([5, 6, 9, 7][len(asked) - 1]), 10).float()

    options = {"num_tokens": 10, "temperature": 0, "seed": 0, "end": 9}
    assert list(generation.generate(next_logits, [1, 2], **options)) == [5, 6]
    assert asked == [[1, 2], [5], [6]]


def test_temperature_scales_the_logits():
    """At temperature 1 a token is drawn with its probability, at a low one the likeliest is drawn."""
    logits, generator = torch.tensor([1.0, 0.0]), torch.Generator().manual_seed(0)
    for temperature, expected in ((1.0, 1 / (1 + math.exp(-1.0))), (0.5, 1 / (1 + math.exp(-2.0))), (0.01, 1.0)):
        draws = [generation.sample(logits, temperature, generator) for _ in range(4000)]
        assert 1 - sum(draws) / len(draws) == pytest.approx(expected, abs=0.03)


def test_the_smallest_temperature_takes_the_likeliest():
    assert generation.sample(torch.tensor([1.0, 3.0, -5.0]), 5e-324, torch.Generator()) == 1


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_of_a_model_that_diverged(value, temperature):
    """The first token is not the likeliest one, and cannot be drawn."""
    with pytest.raises(InputError, match=mentions(f"logits {value}")):
        generation.sample(torch.tensor([1.0, value, 0.0]), temperature, torch.Generator())


def test_bytes_are_shown_by_characters():
    codec = generation.ByteCodec()
    assert codec.encode("é") == [0xC3, 0xA9]
    assert [codec.decode(token) for token in (0xC3, 0xA9, 0x61)] == ["", "é", "a"]


def test_a_tokenizer(tmp_path):
    """A prompt has all of its tokens, whatever the file says of the lengths of texts."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat, the end"] * 9, trainer)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = generation.FileCodec(tmp_path / "tokenizer.json", end=0)
    tokens = codec.encode("the mat: é")
    assert len(tokens) < len("the mat: é") and codec.vocab_size == tokenizer.get_vocab_size()
    assert "".join(codec.decode(token) for token in tokens) == "the mat: é"


def test_a_tokenizer_that_ends_each_text(tmp_path):
    """The end is no part of a prompt: the model would begin another text."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[END]": 0, "[BEGIN]": 1, "x": 2}, unk_token="x"))
    tokenizer.add_special_tokens(["[END]", "[BEGIN]"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BEGIN] $A [END] [END]", special_tokens=[("[END]", 0), ("[BEGIN]", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = generation.FileCodec(tmp_path / "tokenizer.json", end=0)
    assert codec.encode("x") == [1, 2]
    assert codec.encode("x[END]") == [1, 2, 0], "the user wrote it"


@pytest.mark.parametrize(("kind", "second"), [("WordPiece", "##ab"), ("Metaspace", "\u2581ab")])
def test_the_first_new_token_continues_the_prompt(kind, second, tmp_path):
    """These decoders write the first token of a text in another way."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0, second: 1}, unk_token="x"))
    tokenizer.decoder = getattr(tokenizers.decoders, kind)()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    codec = generation.FileCodec(tmp_path / "tokenizer.json", end=0)
    assert codec.encode("x") == [0]
    assert codec.decode(1) == ("ab" if kind == "WordPiece" else " ab")


def test_a_prompt_without_tokens(run, monkeypatch, capsys):
    """Tokenizers drop some characters, such as spaces."""
    codec = SimpleNamespace(end=0, encode=lambda text: [])
    monkeypatch.setattr(generation, "codec_of", lambda config, tokenizer: codec)
    assert cli.main(["generate", str(run), "--prompt", "  "]) == 2
    assert re.search(mentions("--prompt token '  '"), capsys.readouterr().err)


def test_without_the_tokenizers_library_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=mentions("--tokenizer tokenizers pip install 'megatron-sb[huggingface]'")):
        generation.FileCodec(tmp_path / "tokenizer.json", end=0)


def test_a_damaged_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=mentions("--tokenizer tokenizer.json damaged")):
        generation.FileCodec(tmp_path / "tokenizer.json", end=0)


DATA = "data={kind: indexed, paths: [a], vocab_size: 300, end_of_document: 299}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", ""], "--prompt ''"),
        (["--prompt", "ab\udcff"], r"--prompt UTF-8 'ab\udcff'"),  # as Python reads the byte 0xff
        (["--tokens", "0"], "--tokens 1 0"),
        (["--temperature", "-1"], "--temperature 0 -1.0"),
        (["--temperature", "nan"], "--temperature 0 nan"),
        (["--seed", "-1"], "--seed 0 -1"),
        (["--model", "other"], "model 'stick_breaking' 'other'"),
        (["--tokenizer", "absent.json"], "--tokenizer 'absent.json'"),
    ],
)
def test_bad_options_are_one_sentence(run, options, words, capsys):
    assert cli.main(["generate", str(run), *(["--prompt", "x"] if "--prompt" not in options else []), *options]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert re.search(mentions(words), line) and not printed.out


def test_a_vocabulary_without_a_tokenizer(run):
    config = load_config(run / "config.yaml", [DATA])
    with pytest.raises(InputError, match=mentions("--tokenizer tokenizer.json 300")):
        generation.codec_of(config, None)


def test_a_folder_without_a_run(tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert f"{str(tmp_path)!r}" in capsys.readouterr().err


def test_a_gpu_that_is_missing(run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["generate", str(run), "--prompt", "x", "--device", "cuda"]) == 2
    assert "--device must be 'auto' or 'cpu', got 'cuda'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="'cpu' or 'auto' without a GPU, got 'cuda'"), load_run(run, device="cuda"):
        pass
    with pytest.raises(ValueError, match=mentions("device 'cpu' 'tpu'")), load_run(run, device="tpu"):
        pass
