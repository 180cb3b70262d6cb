"""Generate text with a model of a run of `megatron-sb train` (`megatron-sb generate`).

Stick-breaking models become transformers models, which have a KV cache. Softmax models run in the training engine,
which has none: it computes all tokens again for each new one.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megatron_sb.training.checkpoint import newest_checkpoint
from megatron_sb.training.config import BYTE_VOCAB_SIZE, TrainingConfig
from megatron_sb.training.loading import check_device, choose_model, config_of, load_run, resolved_device
from megatron_sb.validation import InputError, MissingFileError

# Maps the tokens that are new since its last call to the logits of the next token: (vocab_size,), on the CPU.
NextLogits = Callable[[Sequence[int]], Tensor]


class Codec(Protocol):
    """Tokens and text of a vocabulary.

    Attributes:
        end: the token that ends a document.
    """

    end: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def decode(self, token: int) -> str:
        """Return the text that one more token completes; empty within a character."""


class ByteCodec:
    """UTF-8: tokens 0 to 255 are bytes, 256 ends a document."""

    end = BYTE_VOCAB_SIZE - 1

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def encode(self, text: str) -> list[int]:
        """See `Codec.encode`."""
        return list(text.encode())

    def decode(self, token: int) -> str:
        """See `Codec.decode`."""
        return self._decoder.decode(bytes([token]))


class FileCodec:
    """A tokenizer in a file of the library `tokenizers`.

    Args:
        path: such as tokenizer.json of `megatron-sb experiment corpus`.
        end: the token that ends a document.
    """

    def __init__(self, path: Path, end: int) -> None:
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise InputError(
                "--tokenizer needs the module tokenizers, which is not installed: "
                "pip install 'megatron-sb[huggingface]'"
            ) from None
        if not path.is_file():
            raise MissingFileError(f"--tokenizer must be a file of the library tokenizers, got {str(path)!r}.")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise InputError(f"--tokenizer: {path} is damaged: {error}") from error
        # A file can say that the library cuts or pads texts, as for the inputs of another model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end, self.vocab_size = end, self._tokenizer.get_vocab_size()
        self._tokens: list[int] = []
        self._shown = 0

    def encode(self, text: str) -> list[int]:
        """See `Codec.encode`. The tokens stand before those of `decode`: some decoders drop a space at the begin."""
        encoding = self._tokenizer.encode(text)
        end = len(encoding.ids)
        while end and encoding.special_tokens_mask[end - 1]:  # the file adds them: the model would begin another text
            end -= 1
        self._tokens = encoding.ids[:end]
        self._shown = len(self._tokenizer.decode(self._tokens))
        return list(self._tokens)

    def decode(self, token: int) -> str:
        """See `Codec.decode`."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        shown, self._shown = self._shown, len(text)
        return text[shown:]


def codec_of(config: TrainingConfig, tokenizer: str | Path | None) -> Codec:
    """Return the codec of a run's data.

    Args:
        config: the run's configuration.
        tokenizer: a file of the library `tokenizers`. Default None: the data are bytes.

    Raises:
        ValueError: The data are not text, or not bytes and there is no tokenizer, or it has another vocabulary.
    """
    data = config.data
    if data.kind not in ("text", "indexed"):
        raise InputError(f"data.kind of the run must be 'text' or 'indexed' to generate text, got {data.kind!r}.")
    is_bytes = (data.vocab_size, data.end_of_document) == (BYTE_VOCAB_SIZE, ByteCodec.end)
    if tokenizer is None:
        if not is_bytes:
            raise InputError(
                f"--tokenizer must be the tokenizer.json of the run's data, whose vocabulary has {data.vocab_size} "
                "tokens, got none. Only bytes need no tokenizer."
            )
        return ByteCodec()
    codec = FileCodec(Path(tokenizer), data.end_of_document)
    if codec.vocab_size != data.vocab_size:
        raise InputError(
            f"--tokenizer must have {data.vocab_size} tokens, as data.vocab_size of the run, got {codec.vocab_size}."
        )
    return codec


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token.

    Args:
        logits: (vocab_size,), on the CPU.
        temperature: divisor of the logits. 0 takes the likeliest token.
        generator: of the CPU.

    Raises:
        ValueError: The largest logit is NaN or infinite.

    Example:
        >>> import torch
        >>> from megatron_sb.generation import sample
        >>> sample(torch.tensor([0.0, 3.0, 1.0]), 0, torch.Generator())
        1
    """
    largest = logits.max()  # NaN if there is one
    if not largest.isfinite():
        raise InputError(
            f"The logits of the model must be finite, got {float(largest)}. The weights of its checkpoint are not "
            "finite or too large, as after a training that diverged."
        )
    if temperature == 0:
        return int(logits.argmax())
    below_largest = logits.double() - largest  # at most 0: the quotient is never inf, also for a tiny temperature
    return int(torch.multinomial((below_largest / temperature).softmax(-1), 1, generator=generator))


@contextlib.contextmanager
def open_model(run: str | Path, model: str, config: TrainingConfig, device: str) -> Iterator[tuple[NextLogits, str]]:
    """Open the newest checkpoint of a model.

    Args:
        run: folder of the run.
        model: a name in config.compare.
        config: the run's configuration.
        device: "auto", "cpu" or "cuda".

    Yields:
        The function that computes logits, and a sentence about the checkpoint and the KV cache.
    """
    if config.breaks_sticks(model):
        yield _cached(Path(run) / model, device, config.vocab_size)
        return
    with load_run(run, model, device) as loaded:
        tokens: list[int] = []

        def next_logits(new: Sequence[int]) -> Tensor:
            tokens.extend(new)
            return loaded.logits(tokens)[-1]

        yield next_logits, f"{loaded.checkpoint}, no KV cache: every token computes all tokens before it again"


def _cached(folder: Path, device: str, vocab_size: int) -> tuple[NextLogits, str]:
    from megatron_sb import checkpoints
    from megatron_sb.checkpoints.runs import find_checkpoint
    from megatron_sb.huggingface.modeling import CACHE_FIELD

    device = resolved_device(device)
    checkpoint = find_checkpoint(folder) or newest_checkpoint(folder / "checkpoints")
    decoder, cache = checkpoints.load(checkpoint).to(device), None

    @torch.no_grad()
    def next_logits(new: Sequence[int]) -> Tensor:
        nonlocal cache
        tokens = torch.tensor([list(new)], device=device)
        found = decoder(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        cache = found[CACHE_FIELD]
        return found.logits[0, -1, :vocab_size].cpu()

    return next_logits, f"{checkpoint}, with a KV cache"


def generate(
    next_logits: NextLogits, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int, end: int
) -> Iterator[int]:
    """Yield new tokens until the end of the document.

    Args:
        next_logits: computes the logits of the next token.
        prompt: at least one token.
        num_tokens: largest number of new tokens.
        temperature: divisor of the logits; 0 takes the likeliest tokens.
        seed: of the random numbers. The same seed gives the same tokens if the logits are the same.
        end: the token that ends a document. It is not yielded.
    """
    generator = torch.Generator().manual_seed(seed)
    new = list(prompt)
    for _ in range(num_tokens):
        token = sample(next_logits(new), temperature, generator)
        if token == end:
            return
        yield token
        new = [token]


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a value that cannot be used."""
    if not arguments.prompt:
        raise InputError("--prompt must have at least one character, got ''.")
    try:
        arguments.prompt.encode()
    except UnicodeEncodeError:  # Python decodes bytes of the command line that are not UTF-8 to surrogates
        raise InputError(f"--prompt must be UTF-8 text, got {arguments.prompt!r}.") from None
    if arguments.tokens < 1:
        raise InputError(f"--tokens must be at least 1, got {arguments.tokens}.")
    if not (math.isfinite(arguments.temperature) and arguments.temperature >= 0):
        raise InputError(f"--temperature must be a finite number of at least 0, got {arguments.temperature}.")
    if not 0 <= arguments.seed < 2**63:
        raise InputError(f"--seed must be from 0 to 2**63 - 1, got {arguments.seed}.")
    check_device(arguments.device)


def main(arguments: argparse.Namespace) -> int:
    """Print the prompt and the generated text. Return the exit status."""
    check_arguments(arguments)
    config = config_of(arguments.folder)
    model = choose_model(config, arguments.model)
    codec = codec_of(config, arguments.tokenizer)
    prompt = codec.encode(arguments.prompt)
    if not prompt:
        raise InputError(f"--prompt must have at least one token, got {arguments.prompt!r}, which has none.")
    with open_model(arguments.folder, model, config, arguments.device) as (next_logits, about):
        print(f"megatron-sb: {about}", file=sys.stderr, flush=True)
        print(arguments.prompt, end="", flush=True)
        options = (arguments.tokens, arguments.temperature, arguments.seed, codec.end)
        for token in generate(next_logits, prompt, *options):
            print(codec.decode(token), end="", flush=True)
        print()
    return 0
