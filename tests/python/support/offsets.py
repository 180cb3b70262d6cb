"""Offsets of packed documents that break the rules.

The host reads no offsets in GPU memory. The kernels clamp them to the rows, and replace each by the largest up to it.
"""

import random
from itertools import accumulate


def wrong_offsets(rows: int) -> dict[str, list[int]]:
    """Return offsets that decrease, overlap or leave the rows, by what is wrong with them."""
    return {
        "decrease": [0, rows // 2, rows // 4, rows],
        "repeat all rows": [0, rows] * 16,
        "overlap": [0, rows // 2, rows // 3, rows // 2 + 1, rows // 3 + 1, rows],
        "negative": [-5, rows // 4, -(2**31), rows],
        "beyond the rows": [0, rows // 3, 2 * rows, 2**31 - 1, rows // 2],
        "begin late": [rows // 3, rows // 2, 1, rows],
        "end before the beginning": [rows, rows // 2, 0],
    }


def corrected(offsets: list[int], rows: int) -> list[int]:
    """Return the offsets that the kernels use."""
    return list(accumulate((min(max(offset, 0), rows) for offset in offsets), max))


def with_wrong_entries(rng: random.Random, *tables: list[int]) -> list[list[int]]:
    """Insert offsets that are too small into tables of equal length, at the same places. Each is an empty document."""
    tables = [list(table) for table in tables]
    for _ in range(rng.randint(1, 3)):
        place = rng.randint(1, len(tables[0]))
        for table in tables:
            table.insert(place, rng.randint(-3, max(table[:place])))
    return tables
