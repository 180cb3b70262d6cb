"""Evaluate a trained model with lm-eval, EleutherAI's lm-evaluation-harness (`megatron-sb eval`).

lm-eval loads the model with transformers. Checkpoints in other formats are converted into a temporary folder first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

import megatron_sb
from megatron_sb import checkpoints
from megatron_sb.checkpoints.files import TOKENIZER_FILES
from megatron_sb.checkpoints.runs import find_checkpoint
from megatron_sb.huggingface import byte_tokenizer
from megatron_sb.training.checkpoint import write_atomically
from megatron_sb.training.config import BYTE_VOCAB_SIZE
from megatron_sb.training.loading import check_device, resolved_device
from megatron_sb.validation import InputError, MissingFileError, check_output_folder, finite, naming

LENGTHS = "max_seq_lengths"  # key of --metadata: lengths of RULER's texts
# RULER appends the begin of the answer to each text, and max_seq_lengths does not count it.
PREFIX_TOKENS = 512
# ruler_vt fits an example into 500 tokens. In bytes the shortest one is longer, and its generator never ends.
ENDLESS_IN_BYTES = ("longcxt", "ruler", "ruler_vt")  # the task, and the group and the tag that contain it
MAX_PADDED_BYTES = 1024  # the largest padded vocabulary that is taken for one of bytes
DEFAULT_GENERATED_TOKENS = 256  # of lm-eval, for tasks without max_gen_toks


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A model that transformers can load.

    Attributes:
        folder: its Hugging Face folder.
        checkpoint: what the folder was made from, or the folder itself.
        format: the format of the checkpoint.
        tokenizer: folder of the tokenizer.
        has_bytes: whether this is the tokenizer of bytes.
        config: the configuration in the folder.
    """

    folder: Path
    checkpoint: Path
    format: str
    tokenizer: Path
    has_bytes: bool
    config: PreTrainedConfig


def main(arguments: argparse.Namespace) -> int:
    """Evaluate, print lm-eval's table and write its results. Return the exit status."""
    metadata = check_arguments(arguments)
    checkpoints.format_of(arguments.checkpoint)
    _check_lm_eval()
    manager = _task_manager(arguments.include_path, metadata)
    names = _match(manager, arguments.tasks)
    with _temporary_folder() as folder, _open(arguments, folder) as model:
        if model.has_bytes and (endless := [name for name in names if name in ENDLESS_IN_BYTES]):
            raise InputError(
                f"--tasks must not contain ruler_vt for a tokenizer of bytes, got {endless[0]!r}. Its generator never "
                "ends: its example must have at most 500 tokens, and is longer in bytes. Name RULER's other tasks."
            )
        print(f"megatron-sb: {model.checkpoint} ({model.format}), tokenizer: {_tokenizer_name(model)}", file=sys.stderr)
        max_length = _max_length(arguments.max_length, metadata, model.config)
        manager.metadata.update(pretrained=str(model.folder), tokenizer=str(model.tokenizer))
        tasks = _load_tasks(manager, names, max_length, arguments.num_fewshot)
        results = _evaluate(arguments, model, manager, tasks, max_length)
        text = _to_json(results, model)
    try:
        if arguments.out is not None:
            out = Path(arguments.out)
            with naming(out):
                out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out, text)
    finally:
        _print_tables(results)
    return 0


def check_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the object in --metadata. Raise ValueError for a value that cannot be used."""
    for name, least in (("limit", 1), ("num_fewshot", 0), ("max_length", 2)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
    size = arguments.batch_size
    if size != "auto" and not (size.isdecimal() and int(size) > 0):
        raise InputError(f"--batch-size must be an integer of at least 1 or 'auto', got {size!r}.")
    check_device(arguments.device)
    for folder in arguments.include_path:
        if not Path(folder).is_dir():
            raise MissingFileError(f"--include-path must be a folder with task files of lm-eval, got {folder!r}.")
    if arguments.tokenizer is not None and not _has_tokenizer(Path(arguments.tokenizer)):
        raise MissingFileError(
            f"--tokenizer must be a folder with the files of a tokenizer, got {arguments.tokenizer!r}."
        )
    if arguments.out is not None:
        _check_out(Path(arguments.out), arguments.overwrite)
    return _metadata(arguments.metadata)


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise InputError(f"--out must be a file, got {str(out)!r}, which is a folder.")
    if out.exists() and not overwrite:
        raise InputError(f"--out must be a new file, got {str(out)!r}, which exists. Use --overwrite to replace it.")
    check_output_folder("--out's folder", out.parent)


def _metadata(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"--metadata must be a JSON object, got {text!r}: {error}.") from None
    if not isinstance(found, dict):
        raise InputError(f"--metadata must be a JSON object, got {text!r}.")
    lengths = found.get(LENGTHS, [1])
    if not (isinstance(lengths, list) and lengths and all(type(length) is int and length > 0 for length in lengths)):
        raise InputError(f"{LENGTHS} in --metadata must be a list of integers of at least 1, got {lengths!r}.")
    return found


def _check_lm_eval() -> None:
    try:
        for module in ("lm_eval", "lm_eval.tasks", "lm_eval.models.huggingface"):  # the last one needs its extra [hf]
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"eval needs the module {error.name}, which is not installed: pip install 'lm-eval[hf]'"
        ) from None


def _task_manager(include_path: list[str], metadata: dict[str, Any]) -> Any:
    """Read the names of all tasks. Tasks get the metadata of the manager when they are loaded."""
    from lm_eval.tasks import TaskManager

    # TaskManager would replace an empty dict by one of its own, and main could not add the model to it.
    return TaskManager(include_path=list(include_path), metadata={"tokenizer": None, **metadata})


def _match(manager: Any, patterns: list[str]) -> list[str]:
    """Return the names of the tasks, groups and tags, each once. Raise ValueError for one that does not exist."""
    names: dict[str, None] = {}
    for pattern in patterns:
        found = manager.match_tasks([pattern])
        if not found:
            near = difflib.get_close_matches(pattern, manager.all_tasks, n=3)
            advice = f" Similar names: {', '.join(near)}." if near else ""
            raise InputError(
                f"--tasks must name tasks of lm-eval or of a folder of --include-path, got {pattern!r}.{advice}"
            )
        names.update(dict.fromkeys(found))
    return list(names)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Make a folder for the converted model. It is removed at the end, also after SIGTERM, as at a time limit."""
    with tempfile.TemporaryDirectory(prefix="megatron-sb-eval-") as folder:
        if threading.current_thread() is not threading.main_thread():  # others get no signals
            yield Path(folder)
            return
        previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            yield Path(folder)
        finally:
            signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _open(arguments: argparse.Namespace, temporary: Path) -> Iterator[SavedModel]:
    """Convert the checkpoint if transformers cannot load it. Choose its tokenizer."""
    source, folder = Path(arguments.checkpoint), temporary / "model"
    source_format = checkpoints.format_of(source)
    options = (arguments.config, arguments.swap_attention, arguments.kv_heads)
    checkpoint = find_checkpoint(source) or source
    if source_format == "llama" and options == (None, False, None):
        folder = source  # evaluated with its own softmax attention
        if not (any(source.glob("*.safetensors")) or any(source.glob("*.bin"))):
            raise MissingFileError(f"{source} has no *.safetensors and no *.bin file.")
    else:
        model = checkpoints.load(checkpoint, *options)  # also checks that a Hugging Face folder has every weight
        if source_format == "huggingface":
            folder = source
        else:
            checkpoints.save(model, folder, "huggingface", tokenizer=source)
        del model
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    tokenizer, has_bytes = _choose_tokenizer(arguments.tokenizer, folder, config, temporary / "tokenizer")
    yield SavedModel(folder, checkpoint, source_format, tokenizer, has_bytes, config)


def _has_tokenizer(folder: Path) -> bool:
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def _choose_tokenizer(given: str | None, folder: Path, config: PreTrainedConfig, new_folder: Path) -> tuple[Path, bool]:
    """Return the folder of the tokenizer, and whether its tokens are bytes. Write the one of bytes if it is needed."""
    if given is None and not _has_tokenizer(folder):
        if config.eos_token_id != BYTE_VOCAB_SIZE - 1 or not BYTE_VOCAB_SIZE <= config.vocab_size <= MAX_PADDED_BYTES:
            raise InputError(
                "--tokenizer must be the folder of the model's tokenizer, whose vocabulary has at most "
                f"{config.vocab_size} tokens, got none. Only models that were trained on bytes need no tokenizer."
            )
        byte_tokenizer().save_pretrained(new_folder)
        return new_folder, True
    path = folder if given is None else Path(given)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    except Exception as error:  # transformers and tokenizers raise no narrower class
        raise InputError(f"--tokenizer: the tokenizer in {path} cannot be loaded: {error}") from error
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"--tokenizer must have at most {config.vocab_size} tokens, as the model's vocabulary, got "
            f"{len(tokenizer)} in {path}."
        )
    text = "byte ½"
    return path, tokenizer(text, add_special_tokens=False)["input_ids"] == list(text.encode())


def _tokenizer_name(model: SavedModel) -> str:
    return "bytes" if model.has_bytes else str(model.tokenizer)


def _max_length(given: int | None, metadata: dict[str, Any], config: PreTrainedConfig) -> int:
    """Return the tokens at which lm-eval truncates texts: at least the longest of RULER's."""
    longest = max(metadata.get(LENGTHS, [0]))
    if given is None:
        return max(config.max_position_embeddings, longest + PREFIX_TOKENS if longest else 0)
    if given < longest:
        raise InputError(
            f"--max-length must be at least {longest}, the largest of {LENGTHS}, got {given}. lm-eval would truncate "
            "the texts."
        )
    return given


def _load_tasks(manager: Any, names: list[str], max_length: int, num_fewshot: int | None = None) -> list[Any]:
    """Load or generate the data of the tasks. Raise ValueError if this fails, or a task cannot be evaluated."""
    tasks: list[Any] = []
    for name in names:
        try:
            loaded = manager.load([name])
        except (ImportError, OSError, ValueError) as error:  # optional packages, downloads, unsuitable lengths
            raise InputError(f"--tasks: {name} cannot be loaded: {' '.join(str(error).split())}") from error
        except (IndexError, StopIteration) as error:  # of the first example; the first one is of datasets
            if isinstance(error, IndexError) and "size 0" not in str(error):
                raise
            raise InputError(f"--tasks: {name} must have at least one example in its data set, got none.") from error
        except LookupError as error:
            if type(error) is not LookupError:  # nltk raises LookupError itself for data that are missing
                raise
            raise InputError(f"--tasks: {name} cannot be loaded: {' '.join(str(error).split())}") from error
        for task in loaded["tasks"].values():
            _check_task(task, max_length)
            _check_num_fewshot(task, num_fewshot)
        tasks += [loaded["groups"][name]] if name in loaded["groups"] else loaded["tasks"].values()
    return tasks


def _check_task(task: Any, max_length: int) -> None:
    """Raise ValueError for a task that lm-eval would fail in later, for example with texts without words."""
    if getattr(task, "UNSAFE_CODE", False):
        raise InputError(
            f"--tasks must not contain a task that runs the code which the model writes, got {task.task_name!r}. "
            "Convert the model to huggingface, and evaluate it with the command lm_eval and --confirm_run_unsafe_code."
        )
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"--tasks must not contain a task with pictures or sounds, got {task.task_name!r}.")
    if task.get_config("output_type") == "generate_until":
        options = task.get_config("generation_kwargs") or {}
        generated = options.get("max_gen_toks", DEFAULT_GENERATED_TOKENS)
        if generated >= max_length:
            raise InputError(
                f"--max-length must be more than {generated}, the tokens that {task.task_name} generates, got "
                f"{max_length}."
            )
    if task.task_name == "ruler_cwe":
        empty = sorted({text["max_length"] for text in task.test_docs() if not text["outputs"]})
        if empty:
            raise InputError(
                f"{LENGTHS} in --metadata must have room for the words of ruler_cwe with this tokenizer, got "
                f"{empty[0]}."
            )


def _check_num_fewshot(task: Any, num_fewshot: int | None) -> None:
    """Raise ValueError if a task has too few examples for the prompts."""
    if not num_fewshot or task.get_config("num_fewshot") == 0:  # lm-eval keeps a task's own 0
        return
    docs = task.fewshot_docs()
    available = len(docs) if isinstance(docs, Sized) else sum(1 for _ in docs)  # a data set would be read whole
    split = getattr(getattr(task, "fewshot_cfg", None), "split", None)
    if split is not None and split == task.get_config("test_split"):
        available -= 1  # lm-eval leaves out the tested example
    if num_fewshot > available:
        raise InputError(
            f"--num-fewshot must be at most {available}, the examples of {task.task_name}, got {num_fewshot}."
        )


def _evaluate(
    arguments: argparse.Namespace, model: SavedModel, manager: Any, tasks: list[Any], max_length: int
) -> dict[str, Any]:
    """Return lm-eval's results."""
    import lm_eval

    return lm_eval.simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(model.folder),
            "tokenizer": str(model.tokenizer),
            "max_length": max_length,
            "trust_remote_code": True,
        },
        tasks=tasks,
        task_manager=manager,
        num_fewshot=arguments.num_fewshot,
        batch_size=arguments.batch_size if arguments.batch_size == "auto" else int(arguments.batch_size),
        device=resolved_device(arguments.device),
        limit=arguments.limit,
        log_samples=False,
    )


def _to_json(results: dict[str, Any], model: SavedModel) -> str:
    """Return the results as JSON, with null for each number that is not finite.

    The checkpoint replaces the temporary folders, which exist no longer.
    """
    from lm_eval.utils import handle_non_serializable

    facts = {
        "version": megatron_sb.__version__,
        "checkpoint": str(model.checkpoint.resolve()),
        "format": model.format,
        "tokenizer": "bytes" if model.has_bytes else str(model.tokenizer.resolve()),
    }
    found = finite({"megatron_sb": facts, **results})
    text = json.dumps(found, indent=2, default=handle_non_serializable, allow_nan=False) + "\n"
    for folder, name in ((model.tokenizer, facts["tokenizer"]), (model.folder, facts["checkpoint"])):
        text = text.replace(json.dumps(str(folder)), json.dumps(name))
    return text


def _print_tables(results: dict[str, Any]) -> None:
    from lm_eval.utils import make_table

    for kind in ("results", "groups"):
        if results.get(kind):
            print(make_table(results, kind))
