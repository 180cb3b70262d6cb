"""Patterns for messages of errors. They require arguments and values, so the sentences can be changed."""

import re


def mentions(words: str) -> str:
    """Return a pattern for `match=` that requires every one of the words, in any order.

    Spaces separate words; a list in brackets, such as "(6, 48)", is one word. A word matches as a whole: "2" matches
    neither "24" nor "2.5", and "q" does not match "cu_seqlens_q".

    Example:
        >>> import re
        >>> bool(re.search(mentions("mass_threshold 2"), "mass_threshold must be in [0, 1), got 2."))
        True
        >>> bool(re.search(mentions("mass_threshold 2"), "mass_threshold must be in [0, 1), got 24."))
        False
    """
    return r"(?s)\A" + "".join(rf"(?=.*{_whole(word)})" for word in re.findall(r"[(\[][^)\]]*[)\]]|\S+", words))


def _whole(word: str) -> str:
    """Return a pattern that matches the word, but not as a part of another name or number."""
    before = r"(?<![\w.])" if re.match(r"\d", word) else r"(?<!\w)" if re.match(r"\w", word) else ""
    after = r"(?!\w|\.\d)" if re.search(r"\d\Z", word) else r"(?!\w)" if re.search(r"\w\Z", word) else ""
    return before + re.escape(word) + after
