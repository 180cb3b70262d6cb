"""benchmarks/attention.py at toy sizes: every row and contender, optional contenders, and the tables."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
FAST = ["--dry-run", "--seconds", "0.001", "--sustained", "0.001"]
FLASH_4 = ["FlashAttention-4", "FlashAttention-4, deterministic"]


@pytest.fixture
def attention(monkeypatch):
    """benchmarks/attention.py, which is not in a package, on the CPU."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module("attention")


@pytest.fixture
def run(attention, tmp_path):
    """Return the record and the tables of a run with these arguments."""

    def of(*args: str) -> tuple[dict, str]:
        files = {option: tmp_path / option.strip("-") for option in ("--json", "--markdown")}
        assert attention.main([*FAST, *args, *(str(word) for item in files.items() for word in item)]) == 0
        return json.loads(files["--json"].read_text()), files["--markdown"].read_text()

    return of


def _softmax(q, k, v):
    heads_first = (x.transpose(-3, -2) for x in (q, k, v))
    gqa = q.shape[-2] != k.shape[-2]
    return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=gqa).transpose(-3, -2)


@pytest.fixture
def flash_4(monkeypatch):
    """A stand-in for the package flash-attn-4 that does not support head_dim 256. It keeps the modes of its calls."""
    module = ModuleType("flash_attn.cute")
    module.modes = set()

    def flash_attn_func(q, k, v, *, causal, deterministic):
        if q.shape[-1] > 128:
            raise ValueError("head_dim must be at most 128")
        assert causal and q.dim() == 4 and q.shape[1] == k.shape[1] == v.shape[1]  # (b, s, h, d)
        module.modes.add(("dense", deterministic))
        return _softmax(q, k, v), None

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, causal, deterministic, **longest):
        assert causal and q.dim() == 3 and cu_seqlens_q[-1] == q.shape[0]  # (t, h, d)
        assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert longest == {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
        module.modes.add(("packed", deterministic))
        documents = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([_softmax(*document) for document in documents]), None

    module.flash_attn_func, module.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return module


def _contenders(record: dict, shape: str) -> dict[str, list[str]]:
    """Return the names of the contenders that ran a shape, by direction."""
    found: dict[str, list[str]] = {}
    for measurement in record["measurements"]:
        if measurement["shape"] == shape:
            found.setdefault(measurement["direction"], []).append(measurement["contender"])
    return found


def test_flash_attention_4_runs_dense_rows_in_both_modes(run, flash_4, attention, monkeypatch):
    monkeypatch.setattr(attention, "SHAPES", attention.SHAPES[:1])
    record, tables = run("--rows", "dense", "--peers", "flash4", "flash4-deterministic")
    assert flash_4.modes == {("dense", False), ("dense", True)}
    assert not record["notes"]
    ran = _contenders(record, "b=8 h=12 d=128 L=64")
    assert ran["backward"] == ran["both"] == ["ours", *FLASH_4]
    heading = next(line for line in tables.splitlines() if line.startswith("| dense"))
    ratio = "ours / FlashAttention-4, deterministic | sustained"
    assert heading == f"| dense | inputs | direction | ours | {' | '.join(FLASH_4)} | ours ms | {ratio} | W | MHz |"


def test_flash_attention_4_runs_packed_rows(run, flash_4, attention, monkeypatch):
    monkeypatch.setitem(attention.VARLEN, "tokens", 2048)
    record, _ = run("--rows", "varlen", "--forward-only", "--peers", "flash4-deterministic")
    assert flash_4.modes == {("packed", True), ("dense", True)}
    assert _contenders(record, "256 tokens, 20 documents, h=12 d=128") == {"forward": ["ours", FLASH_4[1]]}


def test_rows_of_kv_heads(run, flash_4, attention, monkeypatch):
    monkeypatch.setattr(attention, "DRY_RUN_FACTOR", 4 * attention.DRY_RUN_FACTOR)
    record, _ = run("--rows", "kv_heads", "--peers", "flash4-deterministic")
    cases = ("b=1 h=2:2 {} L=32", "b=1 h=8:1 {} L=64", "b=1 h=16:1 {} L=64", "b=1 h=16:2 {} L=64")
    cases += ("b=1 h=4:4 {} L=64", "b=1 h=32:8 {} L=64", "b=2 h=12:12 {} L=64", "b=2 h=12:4 {} L=64")
    cases += ("b=1 h=8:1 {} L=256",)
    shapes = {case.format(d) for case in cases for d in ("d=128", "d=64")}
    assert {m["shape"] for m in record["measurements"]} == shapes
    names = ["ours", FLASH_4[1]]
    assert all(_contenders(record, shape) == {"forward": names, "backward": names} for shape in shapes)


def test_a_shape_that_a_contender_does_not_support_is_a_note(run, flash_4):
    record, tables = run("--rows", "heads", "--forward-only", "--peers", "flash4")
    assert _contenders(record, "b=1 h=12 d=96 L=256") == {"forward": ["ours", FLASH_4[0]]}
    assert _contenders(record, "b=1 h=12 d=256 L=256") == {"forward": ["ours"]}
    why = "ValueError: head_dim must be at most 128"
    notes = [f"FlashAttention-4 cannot run heads forward, b=1 h=12 d={d} L=256: {why}" for d in (192, 256, "192/128")]
    assert record["notes"] == notes
    assert all(f"- {note}" in tables for note in notes)


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_a_package_that_cannot_be_imported_is_a_note(run, error, monkeypatch, tmp_path):
    """RuntimeError: a package whose compiler or driver is missing."""
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text(f"raise {error.__name__}('no compiler')")
    monkeypatch.syspath_prepend(tmp_path)
    record, _ = run("--rows", "dense", "--lengths", "4096", "--forward-only", "--peers", "flash4")
    why = f"{error.__name__}: no compiler"
    assert record["notes"] == [f"FlashAttention-4: Python cannot import flash_attn.cute ({why})"]
    assert {m["contender"] for m in record["measurements"]} == {"ours"}


def test_a_run_that_is_stopped_keeps_what_it_has_measured(run, attention, monkeypatch, tmp_path):
    def stop(bench):
        raise SystemExit(143)

    monkeypatch.setitem(attention.RUNNERS, "portable", stop)
    with pytest.raises(SystemExit):
        run("--rows", "skip", "portable", "--peers")
    record = json.loads((tmp_path / "json").read_text())
    assert {measurement["group"] for measurement in record["measurements"]} == {"skip"}
    assert record["notes"][-1] == "The run was stopped before its end."
    assert record["notes"][-1] in (tmp_path / "markdown").read_text()


def test_the_process_of_the_portable_kernels_has_the_same_options(run, attention, monkeypatch):
    record, _ = run("--rows", "portable", "--forward-only", "--peers", "--no-ceilings")
    assert [measurement["direction"] for measurement in record["measurements"]] == ["forward"]


def test_notes_of_the_portable_kernels_are_in_the_record(run, attention, monkeypatch, tmp_path):
    def child(command, **options):
        record = {"measurements": [], "notes": ["ours, portable cannot run portable forward: no memory"]}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(record))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(attention.subprocess, "run", child)
    record, _ = run("--rows", "portable", "--peers", "--no-ceilings")
    assert record["notes"] == ["ours, portable cannot run portable forward: no memory"]


@pytest.mark.parametrize("row", ["dense", "skip"])
def test_a_length_that_no_row_has_is_an_error(attention, capsys, row):
    with pytest.raises(SystemExit):
        attention.main([*FAST, "--rows", row, "--lengths", "8192"])
    message = rf"--lengths must be some of \[4096, 16384, 65536\] with --rows {row}, got \[8192\]"
    assert re.search(message, capsys.readouterr().err)
    assert attention.parse([*FAST, "--rows", row, "kv_heads", "--lengths", "8192"]).lengths == [8192]


@pytest.mark.parametrize("rows", ["varlen", "heads portable"])
def test_lengths_of_rows_without_a_choice_of_lengths_are_an_error(attention, capsys, rows):
    with pytest.raises(SystemExit):
        attention.main([*FAST, "--rows", *rows.split(), "--lengths", "4096"])
    message = rf"--lengths selects from the rows dense, kv_heads, skip, got --rows {rows}\. Leave out --lengths"
    assert re.search(message, capsys.readouterr().err)
