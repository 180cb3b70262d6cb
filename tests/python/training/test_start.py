"""What a run does at its start."""

import sys

from support.jobs import run_command


def test_the_engine_is_imported_without_flash_linear_attention(tmp_path):
    """It would take ten seconds. Another import finds the package afterwards."""
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise RuntimeError('imported')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from megatron_sb.training import loop\n"
        "assert loop.import_engine().__name__ == 'Engine'\n"
        "try:\n"
        "    import fla\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    status, output, errors = run_command([sys.executable, "-c", script])
    assert (status, output) == (0, "imported\n"), errors
