"""Every Python block of README and docs runs, and every command of a `bash` block is one that works.

The Python blocks of a page run in order in one namespace. Commands are checked without running them: the program knows
the subcommand and every option, and every file, make target and extra exists. A comment before a block makes an
exception: `<!-- not run: REASON -->`.
"""

import contextlib
import importlib
import io
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.project import project_table

from megatron_sb import cli

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "configs/*.md", "benchmarks/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
# Drawings, formulas, and languages that other tests check.
NOT_CODE = ("text", "bibtex", "cmake", "cpp", "cuda", "yaml")
BLOCK = re.compile(r"(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]+(\.yaml)?$|.*/STEP$")  # what the reader replaces


@dataclass(frozen=True)
class Block:
    """A fenced block. line: number of the block's first line in the page, from 1."""

    language: str
    code: str
    reason: str | None
    line: int


def _blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found["language"], found["code"], found["reason"], text.count("\n", 0, found.start("code")))
        for found in BLOCK.finditer(text)
    ]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_python_blocks_run(page):
    blocks = [block for block in _blocks(page) if block.language == "python" and block.reason is None]
    if not blocks:
        pytest.skip("no Python block")
    if page.name == "huggingface.md":
        pytest.importorskip("transformers")
    namespace = {"__name__": "page"}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_block_names_its_language(page):
    for block in _blocks(page):
        assert block.language in ("python", "bash", *NOT_CODE), f"{page}:{block.line}: {block.language!r}"


def _commands(code: str) -> list[list[str]]:
    """Return the words of each command, without comments and environment variables."""
    lines = code.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [[word for word in command if not re.match(r"[A-Z_]+=", word)] for command in commands if command]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_exist(page):
    for block in _blocks(page):
        if block.language == "bash":
            for command in _commands(block.code):
                error = _error(command, must_be_known=block.reason is None)
                assert error is None, f"{page}:{block.line}: {shlex.join(command)}: {error}"


def _error(command: list[str], must_be_known: bool) -> str | None:
    """Return what is wrong with a command, or None. must_be_known: reject programs that this test does not know."""
    program, *words = command
    program = Path(program).name
    if program == "torchrun":
        # Every option of torchrun itself is followed by a value.
        while words and words[0].startswith("--"):
            words = words[2:]
        program = "python"
    if program == "make":
        return next((f"no make target {word}" for word in words if not _is_make_target(word)), None)
    if program == "pip":
        return next((f"no extra in {word}" for word in words if word.startswith(".[") and not _has_extras(word)), None)
    if program == "megatron-sb":
        return _option_error(words)
    if program == "python" and words[0] == "-m":
        module, *words = words[1:]
        if importlib.util.find_spec(module) is None:
            return f"no module {module}"
        return _missing_file(words)
    if program == "python" and words[0] != "-c" and "-c" not in words:
        return _missing_file(words) or _script_error(words)
    if must_be_known and program not in ("python", "git"):
        return "unknown program; write <!-- not run: REASON --> before the block"
    return None


def _is_make_target(word: str) -> bool:
    return re.search(rf"^{re.escape(word)}:", (ROOT / "Makefile").read_text(), re.M) is not None


def _has_extras(word: str) -> bool:
    return set(word[2:-1].split(",")) <= project_table()["optional-dependencies"].keys()


def _missing_file(words: list[str]) -> str | None:
    """Report the first word that looks like a file of this repository but does not exist."""
    folders = ("examples", "benchmarks", "configs", "tests", "docs")
    paths = [word for word in words if word.split("/")[0] in folders and "/" in word]
    return next((f"no file {path}" for path in paths if not (ROOT / path).exists()), None)


def _script_error(words: list[str]) -> str | None:
    """Report the first option that a script of benchmarks/ lacks."""
    script, *words = words
    if not script.startswith("benchmarks/"):
        return None
    text = _sources(ROOT / script)
    options = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--help"]
    return next((f"no option {option}" for option in options if f'"{option}"' not in text), None)


def _sources(script: Path) -> str:
    """Return the text of a script, and of the modules beside it that it imports."""
    text = script.read_text()
    modules = (script.with_name(f"{name}.py") for name in re.findall(r"^(?:from|import) (\w+)", text, re.M))
    return "\n".join([text, *(_sources(module) for module in modules if module.exists())])


def _option_error(words: list[str]) -> str | None:
    """Report the first option that `megatron-sb --help` lacks. Raise an error for an override of an unknown field."""
    num_names = 2 if words[0] == "experiment" else 1
    names = [word for word in words[:num_names] if not word.startswith("-") and not PLACEHOLDER.match(word)]
    text = _help(*names)
    for word in words:
        if word.startswith("--") and not re.search(rf"(?<![\w-]){re.escape(word.partition('=')[0])}(?![\w-])", text):
            return f"no option {word}"
    if words[0] == "train" and words[1].endswith(".yaml") and not PLACEHOLDER.match(words[1]):
        config = importlib.import_module("megatron_sb.training.config")
        overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        config.load_config(ROOT / words[1], overrides)  # raises for a field that does not exist
    return _missing_file(words)


def _help(*names: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as exit:
        cli.main([*names, "--help"])
    assert exit.value.code == 0, names
    return out.getvalue()


def _options(text: str) -> list[str]:
    """Return the options in a help text, without --help."""
    found = re.findall(r"(?<=[\s\[])--[\w-]+", text)
    assert "--help" in found, "the help has another form"
    return [option for option in found if option != "--help"]


@pytest.mark.parametrize("command", ["info", "bench", "train", "plan", "generate", "eval", "convert"])
def test_every_option_is_in_the_reference(command):
    explained = (ROOT / "docs/cli.md").read_text()
    for option in _options(_help(command)):
        assert f"`{option}`" in explained, f"docs/cli.md lacks {command} {option}"


def test_every_option_of_an_experiment_is_in_the_reference():
    from megatron_sb.experiments import EXPERIMENTS

    explained = (ROOT / "docs/cli.md").read_text()
    for name in EXPERIMENTS:
        assert f"`{name}`" in explained
        for option in _options(_help("experiment", name)):
            assert f"`{option}`" in explained, f"docs/cli.md lacks {name} {option}"


def test_every_flag_of_megatron_is_in_the_guide():
    import argparse

    from megatron_sb.megatron.arguments import add_arguments

    explained = (ROOT / "docs/megatron.md").read_text()
    flags = _options(add_arguments(argparse.ArgumentParser()).format_help())
    assert len(flags) > 10
    for option in flags:
        assert option in explained, f"docs/megatron.md lacks {option}"
