"""benchmarks/exchanged_heads.py: an attention around which two ranks exchange heads is the attention of one rank."""

from support.launch import run_worker


def test_two_ranks(tmp_path):
    errors = run_worker("exchanged_heads_run.py", 2, tmp_path / "errors.json")
    assert all(error < 1e-12 for error in errors.values()), errors
