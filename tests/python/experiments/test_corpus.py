"""The corpus of installed packages: what is dropped, the split by project, the report and the tokenizer."""

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest

from megatron_sb.cli import main
from megatron_sb.experiments import corpus
from megatron_sb.experiments.corpus import SIDES, CorpusConfig, build, list_projects, side_of, train_tokenizer
from megatron_sb.experiments.deduplication import LONGEST_LINE, LONGEST_WINDOW, SHORTEST_WINDOW, Deduplicator, windows
from megatron_sb.training.directory import hold
from megatron_sb.training.documents import BYTE_END_OF_DOCUMENT

LICENCE = b"".join(b"Line %d of a licence that every project has.\n" % line for line in range(12))
LABELS = {"sides": "train", "projects": "a", "extensions": ".py"}


def lines(seed, count):
    generator = np.random.default_rng(seed)
    return b"".join(b"value_%d = %d\n" % tuple(generator.integers(0, 10**6, 2)) for _ in range(count))


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Twenty distributions whose files partly repeat each other."""
    site = tmp_path / "site"
    for index in range(20):
        package, info = site / f"pack_{index}", site / f"pack_{index}-1.0.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        files = {
            package / "own.py": lines(index, 100),
            package / "licensed.py": LICENCE + lines(100 + index, 100),
            package / "LICENCE.txt": LICENCE,
            package / "empty.py": b"",
            package / "latin.txt": b"caf\xe9\n",
            package / "data.h": b"0" * (LONGEST_LINE + 1),
            package / "image.png": b"not asked for",
            info / "METADATA": b"Metadata-Version: 2.1\nName: pack_%d\nVersion: 1.0\n" % index,
        }
        for path, text in files.items():
            path.write_bytes(text)
        record = "".join(f"{path.relative_to(site)},,\n" for path in files) + "pack/missing.py,,\n"
        (info / "RECORD").write_text(record)
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "copy.py").write_bytes(lines(3, 100))  # of a file of pack-3
    (folder / "other.md").write_bytes(lines(200, 50))
    names = tuple(f"pack_{index}" for index in range(20))
    return CorpusConfig(distributions=names, paths=(str(folder),), validation_fraction=0.3, test_fraction=0.3)


def texts_of(folder):
    return {side: [text.encode() for text in corpus._texts(folder, side)] for side in SIDES}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_windows_make_up_the_text_and_agree_again_after_a_difference():
    text = lines(0, 2000)
    cut = list(windows(text))
    assert b"".join(cut) == text
    assert all(SHORTEST_WINDOW <= len(window) <= LONGEST_WINDOW + SHORTEST_WINDOW for window in cut)
    assert len({*windows(b"inserted = 1\n" + text)} & {*cut}) > 0.9 * len(cut)
    line = next(line for line in (b"%030d\n" % number for number in range(9)) if len([*windows(99 * line)]) == 3)
    assert [len(window) for window in windows(99 * line)] == [1023, 1023, 1023], "no checksum ends a window"
    assert list(windows(b"short")) == [b"short"]
    assert list(windows(b"")) == [b""]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b"\xff\n", "not text in UTF-8"),
        (b"a\0b\n", "not text in UTF-8"),
        (b"1" * (LONGEST_LINE + 1), "long lines"),
        (LICENCE, "copies of files"),
        (LICENCE + LICENCE, "copies of windows"),
    ],
)
def test_reasons_to_drop(text, reason):
    deduplicator = Deduplicator()
    assert deduplicator.keep(LICENCE, LABELS) == LICENCE
    kept = deduplicator.keep(text, LABELS)
    report = deduplicator.report()
    dropped = {name: tally for name, tally in report["dropped"].items() if tally["bytes"] or tally["documents"]}
    assert dropped == {reason: {"documents": int(not kept), "bytes": len(text) - len(kept)}}
    assert (not kept) or reason == "copies of windows"


def test_no_project_and_no_window_is_on_two_sides(config, tmp_path):
    report = build(config, tmp_path / "bytes")
    projects = [project for side in SIDES for project in report["projects_of"][side]]
    assert sorted(projects) == sorted({*projects}) == sorted(list_projects(config)) and len(projects) == 21
    seen = set()
    for texts in texts_of(tmp_path / "bytes").values():
        found = [window for text in texts for window in windows(text)]
        assert not seen & {*found}
        seen |= {*found}
    assert all(side_of(project, config) == side for side in SIDES for project in report["projects_of"][side])


def test_report_adds_up(config, tmp_path):
    report = build(config, tmp_path / "bytes")
    texts = [text for texts in texts_of(tmp_path / "bytes").values() for text in texts]
    assert report["kept"] == {"documents": len(texts), "bytes": sum(map(len, texts))}
    assert report["found"]["documents"] == 20 * 7 + 2
    for unit in ("documents", "bytes"):
        dropped = sum(tally[unit] for tally in report["dropped"].values())
        assert report["found"][unit] == report["kept"][unit] + dropped
        for table in ("sides", "projects", "extensions"):
            for kind in ("found", "kept"):
                assert sum(row[kind][unit] for row in report[table].values()) == report[kind][unit]
    for reason in ("empty", "not text in UTF-8", "long lines"):
        assert report["dropped"][reason]["documents"] == 20
    assert report["dropped"]["copies of files"]["documents"] == 19 + 1
    assert report["dropped"]["copies of windows"]["bytes"] > 10 * len(LICENCE)
    assert {*report["extensions"]} == {".py", ".txt", ".h", ".md", "METADATA"}


def test_the_trainer_reads_the_same_result_of_two_builds(config, tmp_path):
    from megatron_sb.megatron.indexed_documents import IndexedDocuments

    other = dataclasses.replace(config, distributions=config.distributions[::-1])
    assert build(config, tmp_path / "bytes") == build(other, tmp_path / "again")
    first = contents(tmp_path / "bytes")
    assert first == contents(tmp_path / "again")
    build(config, tmp_path / "bytes")  # replaces the folder
    assert contents(tmp_path / "bytes") == first and not list(tmp_path.glob(".*.tmp"))
    documents = IndexedDocuments([str(tmp_path / "bytes" / "train")], BYTE_END_OF_DOCUMENT)
    length = int(next(documents.measure())[0])
    assert documents.read(0, 0, length)[-1] == BYTE_END_OF_DOCUMENT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distributions": ("no-such-pack",)}, "distributions must be installed, got 'no-such-pack'"),
        ({"distributions": ("pack_1", "pack-1")}, "distributions must have different items, got 'pack-1' twice"),
        ({"include": ("*.cu",), "paths": ()}, "must leave files of every distribution, got none of 'pack_0'"),
        ({"exclude": ("a/b",), "paths": ()}, "^exclude must have patterns of names, without '/', got 'a/b'"),
        ({"paths": ("nowhere",)}, "got 'nowhere', which names no file"),
        ({"distributions": ("pack_1",), "paths": ()}, "must have text for every side, got none for"),
        ({"distributions": (), "paths": ()}, "got none for train, validation, test from 0 projects"),
        ({"test_fraction": 0.7}, "must be less than 1, got 0.3 \\+ 0.7"),
    ],
)
def test_errors_name_the_value(config, fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(config, **fields), tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists() and not list(tmp_path.glob(".*.tmp"))


def test_command_writes_both_encodings_of_the_same_text(config, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    from megatron_sb.megatron.indexed_documents import IndexedDocuments

    fields = dataclasses.asdict(config) | {"vocab_size": 300}
    (tmp_path / "corpus.yaml").write_text(json.dumps(fields))
    out = tmp_path / "out"
    assert main(["experiment", "corpus", str(tmp_path / "corpus.yaml"), "--out", str(out)]) == 0
    report = json.loads((out / "report.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "bpe" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300 and tokenizer.token_to_id("<|end|>") == 0
    for side, texts in texts_of(out / "bytes").items():
        documents = IndexedDocuments([str(out / "bpe" / side)], 0)
        lengths = np.concatenate(list(documents.measure())).tolist()
        read = [documents.read(index, 0, length) for index, length in enumerate(lengths)]
        assert [tokenizer.decode(tokens[:-1].tolist()).encode() for tokens in read] == texts
        assert all(tokens[-1] == 0 for tokens in read) and sum(lengths) == report["tokens"][side]
    train_tokenizer(out / "bytes", 300, tmp_path / "again")
    assert contents(tmp_path / "again")["tokenizer.json"] == (out / "bpe" / "tokenizer.json").read_bytes()


def test_the_command_lists_the_files_once(config, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(corpus, "list_projects", lambda given: calls.append(given) or list_projects(given))
    (tmp_path / "corpus.yaml").write_text(json.dumps(dataclasses.asdict(config)))
    assert main(["experiment", "corpus", str(tmp_path / "corpus.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert len(calls) == 1


def test_a_vocabulary_that_is_too_large_for_the_text_is_an_error(config, tmp_path):
    """`generate` compares data.vocab_size of a run, which is this field, with the tokens of tokenizer.json."""
    pytest.importorskip("tokenizers")
    build(config, tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"vocab_size must be at most \d+, .* got 100000\.") as raised:
        train_tokenizer(tmp_path / "bytes", 100_000, tmp_path / "bpe")
    assert sorted(path.name for path in tmp_path.iterdir() if "bpe" in path.name) == []
    most = int(re.search(r"at most (\d+)", str(raised.value))[1])
    train_tokenizer(tmp_path / "bytes", most, tmp_path / "bpe")
    assert len(json.loads((tmp_path / "bpe" / "tokenizer.json").read_text())["model"]["vocab"]) == most


def test_the_report_is_of_the_bytes_beside_it(config, tmp_path, capsys):
    """Also if their tokenizer cannot be trained. That of an earlier build was left."""
    pytest.importorskip("tokenizers")
    (tmp_path / "corpus.yaml").write_text(json.dumps(dataclasses.asdict(config) | {"vocab_size": 100_000}))
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("{}")
    assert main(["experiment", "corpus", str(tmp_path / "corpus.yaml"), "--out", str(out)]) == 2
    assert "vocab_size must be at most" in capsys.readouterr().err
    report = json.loads((out / "report.json").read_text())
    assert report["kept"]["documents"] == sum(map(len, texts_of(out / "bytes").values())) and "tokens" not in report


def test_tokens_of_an_earlier_build_do_not_stay_beside_other_bytes(config, tmp_path, capsys):
    """A project can be on another side there."""
    pytest.importorskip("tokenizers")
    out, fields = tmp_path / "out", dataclasses.asdict(config)
    (out / "bpe").mkdir(parents=True)
    (tmp_path / "corpus.yaml").write_text(json.dumps(fields))
    command = ["experiment", "corpus", str(tmp_path / "corpus.yaml"), "--out", str(out)]
    assert main(command) == 2
    assert f"vocab_size must be given, because {out / 'bpe'} has tokens" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["bpe"]
    assert main([*command, "--set", "vocab_size=100000"]) == 2  # the text is too short
    assert (out / "bytes").exists() and not (out / "bpe").exists()
    assert main(command) == 0


def test_two_commands_do_not_write_one_corpus(config, tmp_path, capsys):
    """The second one would delete the unfinished files of the first one."""
    (tmp_path / "corpus.yaml").write_text(json.dumps(dataclasses.asdict(config)))
    out = tmp_path / "out"
    unfinished = out / ".bytes.new.tmp" / "test.bin"
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    command = ["experiment", "corpus", str(tmp_path / "corpus.yaml"), "--out", str(out)]
    with hold(out):
        assert main(command) == 2
    assert f"another job is writing to {out}" in capsys.readouterr().err and unfinished.exists()
    assert main(command) == 0 and not unfinished.exists() and (out / "report.json").exists()


def test_an_error_leaves_no_folder(config, tmp_path):
    fields = dataclasses.asdict(config) | {"distributions": ["pack_1"], "paths": []}  # no text for some sides
    (tmp_path / "corpus.yaml").write_text(json.dumps(fields))
    assert main(["experiment", "corpus", str(tmp_path / "corpus.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_the_command_prints_its_error_alone(tmp_path):
    """No warnings of Megatron-Core, which a new process imports."""
    (tmp_path / "corpus.yaml").write_text("distributions: [no-such-pack]\n")
    command = [sys.executable, "-m", "megatron_sb.cli", "experiment", "corpus", str(tmp_path / "corpus.yaml")]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == (
        "megatron-sb: distributions must be installed, got 'no-such-pack'. Install it, or leave it out.\n"
    )


def test_without_the_tokenizers_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the module tokenizers, .* pip install 'megatron-sb\[huggingface\]'"):
        corpus.check_tokenizer(300)


def test_a_vocabulary_holds_all_bytes():
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257, .* got 256"):
        corpus.check_tokenizer(256)
