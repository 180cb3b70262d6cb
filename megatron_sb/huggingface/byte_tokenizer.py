"""A tokenizer for models that `megatron-sb train` trained on bytes."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END_OF_DOCUMENT = "<|end|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of UTF-8 bytes: tokens 0 to 255 are bytes, 256 ends a document.

    Returns:
        A tokenizer that `AutoTokenizer` can load after save_pretrained.

    Example:
        >>> from megatron_sb.huggingface import byte_tokenizer
        >>> byte_tokenizer()("ab")["input_ids"]
        [97, 98]
    """
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = {"bos_token": END_OF_DOCUMENT, "eos_token": END_OF_DOCUMENT, "pad_token": END_OF_DOCUMENT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **end)


def _characters() -> list[str]:
    """Return the printable character that stands for each byte in the tokenizers library."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
