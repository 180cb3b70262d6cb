"""Drop texts that a model cannot learn from, and text that is already in the corpus.

A text is cut into windows of whole lines. A window ends where a checksum of its last line says so. Two texts that share
some lines therefore share windows, whatever stands before these lines. The first text with a window keeps it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

LONGEST_LINE = 1000  # bytes; a file with a longer line is rarely written by hand
SHORTEST_WINDOW = 128  # bytes
LONGEST_WINDOW = 1024  # bytes
LINES_PER_END = 4  # one line in 4 ends a window that is long enough

# Reasons to drop a text or a part of it.
EMPTY, NOT_TEXT, LONG_LINES = "empty", "not text in UTF-8", "long lines"
COPIED_FILE, COPIED_WINDOW = "copies of files", "copies of windows"
REASONS = (EMPTY, NOT_TEXT, LONG_LINES, COPIED_FILE, COPIED_WINDOW)

Tally = dict[str, int]


def windows(text: bytes) -> Iterator[bytes]:
    """Cut a text into windows whose ends depend only on the lines near them.

    A window has SHORTEST_WINDOW to LONGEST_WINDOW bytes. The last one can be SHORTEST_WINDOW bytes longer, so that no
    short one is left. A window with a line of nearly LONGEST_WINDOW bytes can also be longer, and a text with fewer
    than SHORTEST_WINDOW bytes is one window.

    Args:
        text: any bytes.

    Yields:
        The windows, which concatenate to the text.

    Example:
        >>> text = b"".join(b"value_%d = %d\\n" % (i, i * i) for i in range(100))
        >>> b"".join(windows(text)) == text
        True
    """
    pending, lines, size = b"", [], 0  # `pending` is a complete window, which what follows may be appended to
    for line in text.splitlines(keepends=True):
        if size >= SHORTEST_WINDOW and size + len(line) > LONGEST_WINDOW:
            if pending:
                yield pending
            pending, lines, size = b"".join(lines), [], 0
        lines.append(line)
        size += len(line)
        if size >= SHORTEST_WINDOW and (zlib.crc32(line) >> 16) % LINES_PER_END == 0:
            if pending:
                yield pending
            pending, lines, size = b"".join(lines), [], 0
    rest = b"".join(lines)
    if pending and len(rest) >= SHORTEST_WINDOW:
        yield pending
        yield rest
    else:
        yield pending + rest


class Deduplicator:
    """Decide what to keep of each text, and count it.

    Texts are compared with those that were given before, so the result depends on their order.

    Example:
        >>> deduplicator = Deduplicator()
        >>> labels = {"sides": "train", "projects": "numpy", "extensions": ".py"}
        >>> deduplicator.keep(b"import os\\n", labels), deduplicator.keep(b"import os\\n", labels)
        (b'import os\\n', b'')
        >>> deduplicator.report()["dropped"]["copies of files"]
        {'documents': 1, 'bytes': 10}
    """

    def __init__(self) -> None:
        self._files: set[bytes] = set()
        self._windows: set[bytes] = set()
        self._found, self._kept = _tally(), _tally()
        self._dropped = {reason: _tally() for reason in REASONS}
        self._tables: dict[str, dict[str, dict[str, Tally]]] = defaultdict(dict)

    def keep(self, text: bytes, labels: Mapping[str, str]) -> bytes:
        """Return what to keep of a text: b"" to drop it.

        Args:
            text: content of a file.
            labels: name of a table of the report -> the row of that table to count the text in.
        """
        kept, reason = self._choose(text)
        if reason is not None:
            self._dropped[reason]["documents"] += not kept
            self._dropped[reason]["bytes"] += len(text) - len(kept)
        rows = [{"found": self._found, "kept": self._kept}]
        for table, label in labels.items():
            rows.append(self._tables[table].setdefault(label, {"found": _tally(), "kept": _tally()}))
        for row in rows:
            row["found"]["documents"] += 1
            row["found"]["bytes"] += len(text)
            row["kept"]["documents"] += bool(kept)
            row["kept"]["bytes"] += len(kept)
        return kept

    def report(self) -> dict[str, Any]:
        """Return what was found, kept and dropped.

        Returns:
            {"found": tally, "kept": tally, "dropped": {reason: tally}} and for every table of the labels
            {label: {"found": tally, "kept": tally}}, sorted by label. A tally is {"documents", "bytes"}. A text of
            which a part is dropped counts as kept, with the bytes that are left of it.
        """
        tables = {name: dict(sorted(rows.items())) for name, rows in self._tables.items()}
        return {"found": self._found, "kept": self._kept, "dropped": self._dropped, **tables}

    def _choose(self, text: bytes) -> tuple[bytes, str | None]:
        """Return what to keep, and the reason to drop the rest."""
        if not text.strip():
            return b"", EMPTY
        if not _is_text(text):
            return b"", NOT_TEXT
        if max(map(len, text.splitlines())) > LONGEST_LINE:
            return b"", LONG_LINES
        if _is_known(text, self._files):
            return b"", COPIED_FILE
        kept = b"".join(window for window in windows(text) if not _is_known(window, self._windows))
        return kept, None if len(kept) == len(text) else COPIED_WINDOW


def _tally() -> Tally:
    return {"documents": 0, "bytes": 0}


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in text


def _is_known(text: bytes, known: set[bytes]) -> bool:
    """Return whether a text's digest is in a set, and add it."""
    digest = hashlib.blake2b(text, digest_size=16).digest()
    if digest in known:
        return True
    known.add(digest)
    return False
