"""Language rules that a test can check: line length, a phrase to avoid, and the messages in troubleshooting.md."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MARKDOWN = sorted(
    path
    for folder in ("", "docs/**/", "configs/", "benchmarks/", "examples/**/", "csrc/**/", ".github/**/")
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


# README.md begins with what the project is, the pages of csrc/ with what a kernel computes.
PAGES = [page for page in MARKDOWN if page != ROOT / "README.md" and ROOT / "csrc" not in page.parents]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_begin_with_their_purpose_and_a_command(page):
    begin = page.read_text().partition("\n## ")[0]
    assert re.match(r"# [^\n]+\n\nAfter reading this page you ", begin)
    assert "\n```" in begin


def test_messages_say_what_is_expected():
    """Messages have the form `X must be Y, got Z`. They do not list what a value may be."""
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


def test_descriptions_of_arguments_begin_in_lower_case():
    """In the sections Args and Attributes of docstrings. Names keep their capital."""
    section = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1    .*\n|\n)+)", re.M)
    capital = r"\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: (?!None|Markdown)(?:A|[A-Z][a-z]+)\b.*"
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in _tracked_files()
        if path.suffix == ".py"
        for indent, lines in section.findall(path.read_text())
        for line in re.findall(f"^{indent}    {capital}", lines, re.M)
    ]
    assert not found, "\n".join(found)


VALUE = "\0"  # stands for a formatted value in a message


def _python_texts(path: Path) -> list[str]:
    """Return the strings of a Python file without its docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [text for node in ast.walk(tree) if id(node) not in docstrings and (text := _text(node))]


def _text(node: ast.AST) -> str:
    """Return the text of a string or an f-string, "" for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or VALUE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _without_comments(path: Path) -> str:
    """Return a C++, CMake or make file with adjacent string literals joined, and quotes inside literals as '."""
    comment = r"^\s*//[^\n]*|\s//\s[^\n]*" if path.suffix in (".h", ".cpp", ".cu", ".cuh") else r"(^|\s)#[^\n]*"
    text = re.sub(comment, "", path.read_text(), flags=re.M)
    return re.sub(r'"\s*\n\s*"', "", text.replace(r"\"", "'"))


def _messages() -> list[str]:
    """Return the texts that the sources can print: a text for each string of Python, and for each other file."""
    python = [path for folder in ("megatron_sb", "cmake") for path in sorted((ROOT / folder).rglob("*.py"))]
    messages = [text for path in python for text in _python_texts(path)]
    others = [*(ROOT / "csrc").rglob("*"), *(ROOT / "cmake").glob("*.cmake*"), ROOT / "CMakeLists.txt"]
    others = [path for path in others if path.suffix in TEXT and path.suffix != ".md"]
    return messages + [_without_comments(path) for path in (*others, ROOT / "Makefile")]


def _quotes() -> list[str]:
    """Return the messages that the first columns of docs/troubleshooting.md quote."""
    lines = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    cells = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
    return [quote for cell in cells for quote in re.findall(r"`([^`]+)`", cell)]


def _is_in(quote: str, message: str) -> bool:
    """Whether a message contains the parts of a quote. "..." separates the parts."""
    parts = (part.strip(" ,:();").replace('"', "'") for part in quote.split("..."))
    return all(part in message.replace('"', "'") for part in parts)


# What other programs print.
FOREIGN = (
    "CMake 3.26 or higher is required",
    "Could NOT find",
    "Could not find a package",
    "Could not find the compiler",
    "Could not resolve the process group",
    "Failed to compile the C++ dataset",
    "Implementation stickbreaking is not supported",
    "Killed signal",
    "No CMAKE_CXX_COMPILER",
    "No matching distribution found",
    "No module named",
    "Transformer Engine is not installed",
    "Unsafe side effect",
    "Unsupported gpu architecture",
    "Received data size doesn't match",
    "Watchdog caught",
    "apply_rope_fusion is not available",
    "cannot open shared object file",
    "cannot use C++ torch::autograd::Function",
    "died due to signal 9",
    "ensurepip is not available",
    "fused_weight_gradient_mlp_cuda",
    "jvp is not implemented for the c++ API",
    "module is not found",
    "name 'TESpecProvider'",
    "no such option: -C",
    "requires a different Python",
    "scikit_build_core",
    "unable to find a build program",
    "undefined symbol",
    "unrecognized arguments",
    "unsupported GNU version",
)


def test_troubleshooting_quotes_messages_that_exist():
    """Where this fails, a message was reworded: quote its new words in docs/troubleshooting.md."""
    messages = _messages()
    own = [quote for quote in _quotes() if not quote.startswith(FOREIGN)]
    missing = [quote for quote in own if not any(_is_in(quote, message) for message in messages)]
    assert not missing, "\n".join(missing)


# What a user can meet at installation and in a distributed job.
EXPLAINED_PYTHON = (
    "megatron_sb/megatron/*.py",
    "megatron_sb/ops/context_parallel.py",
    "megatron_sb/ops/library.py",
    "megatron_sb/training/*.py",
    "megatron_sb/training/engine/*.py",
)
EXPLAINED_CPP = ("csrc/distributed/*.cpp", "csrc/plan/*.cpp")
EXPLAINED_CMAKE = ("CMakeLists.txt", "cmake/*.cmake")
NOT_SHOWN = (
    "A list of layers cannot contain",  # layer_pattern replaces it
    " waited ",  # the transport of the C++ tests, and the next
    " and expected ",
    "${sb_torch_error}",  # a message of sb_torch_failed
)


def _raised(path: Path) -> list[str]:
    """Return the messages of the errors that a Python file raises, except AttributeError."""
    raised = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
    calls = [error for error in raised if isinstance(error, ast.Call) and error.args]
    return [_text(call.args[0]) for call in calls if getattr(call.func, "id", "") != "AttributeError"]


def _thrown(path: Path) -> list[str]:
    """Return the messages of the errors that a C++ file throws."""
    statements = re.findall(r"\b(?:throw|TORCH_CHECK\w*)\b[^;]*", _without_comments(path))
    return [VALUE.join(re.findall(r'"([^"]*)"', statement)) for statement in statements]


def _configured(path: Path) -> list[str]:
    """Return the warnings and errors of a CMake file."""
    command = r"(?:message\((?:WARNING|FATAL_ERROR) |sb_torch_failed\()"
    return re.findall(rf'{command}"([^"]*)"', _without_comments(path))


def test_troubleshooting_explains_every_message():
    """Where this fails, a message is new: explain it in docs/troubleshooting.md."""
    readers = ((EXPLAINED_PYTHON, _raised), (EXPLAINED_CPP, _thrown), (EXPLAINED_CMAKE, _configured))
    files = [(path, read) for patterns, read in readers for pattern in patterns for path in ROOT.glob(pattern)]
    messages = [text for path, read in files for text in read(path)]
    messages = [text for text in messages if len(text.replace(VALUE, " ").split()) > 1]  # not only values
    assert len(messages) > 100
    known = [*_quotes(), *NOT_SHOWN]
    missing = [text for text in messages if not any(_is_in(quote, text) for quote in known)]
    assert not missing, "\n".join(missing)
