"""Text rules that a machine can check: line length, phrases to avoid, and messages that troubleshooting.md explains."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MARKDOWN = sorted(
    path
    for folder in ("", "docs/**/", "configs/", "benchmarks/", "csrc/**/", ".github/**/")
    for path in ROOT.glob(f"{folder}*.md")
)
TEXT = (".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".yaml", ".yml", ".toml", ".cmake", ".txt", ".sh", ".sbatch", ".in")
MAX_LINE = 120


def _tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_are_short(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for line in text.splitlines():
        is_exempt = line.lstrip().startswith("|") or re.search(r"\]\([^)]*\)|https?://", line)
        assert len(line) <= MAX_LINE or is_exempt, line


def test_messages_say_what_is_expected():
    """`X must be Y, got Z`, and never "Z is allowed"."""
    phrase = re.compile(r"\b(is|are) " + "allowed")
    results = ROOT / "benchmarks/results"
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in _tracked_files()
        if results not in path.parents and path.name != Path(__file__).name
        for line in path.read_text().splitlines()
        if phrase.search(line)
    ]
    assert not found, "\n".join(found)


def _sources() -> str:
    """All sources in one line, with adjacent string literals joined."""
    files = [path for folder in ("megatron_sb", "csrc", "cmake") for path in sorted((ROOT / folder).rglob("*"))]
    files += [ROOT / "CMakeLists.txt"]
    text = "\n".join(path.read_text() for path in files if path.suffix in TEXT)
    text = text.replace('\\"', "'")
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\s+", " ", text)


# What other programs print.
FOREIGN = ("Could NOT find", "Could not find a package", "Watchdog caught")


def test_troubleshooting_quotes_messages_that_exist():
    """Where this fails, a message was reworded: quote its new words in docs/troubleshooting.md."""
    sources, missing = _sources().replace('"', "'"), []
    for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines():
        for quoted in re.findall(r"`([^`]+)`", line.split(" | ")[0]) if line.startswith("| `") else ():
            if not quoted.startswith(FOREIGN):
                parts = [part.strip(" ,:();").replace('"', "'") for part in quoted.split("...")]
                missing += [f"{part!r} of {quoted!r}" for part in parts if part not in sources]
    assert not missing, "\n".join(missing)
