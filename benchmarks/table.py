"""What benchmarks of one table share: their arguments, the table as it is measured, the record."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from timing import machine, on_gpu


def table_main(
    doc: str,
    args: list[str] | None,
    heads: list[str],
    rows: Callable[[argparse.Namespace], Iterable[dict]],
    line: Callable[[dict], str],
    seconds: float = 0.5,
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> None:
    """The main of a benchmark that is one table: measures rows(options), prints line(row) of each, writes them all.

    seconds: the default of options.seconds.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=seconds, help="of device time for the rounds of one line")
    parser.add_argument("--json", type=Path, help="write everything measured here")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes without a GPU, to try this script")
    add_arguments(parser)
    options = parser.parse_args(args)
    if not on_gpu() and not options.dry_run:
        parser.error("torch sees no GPU here; --dry-run tries the script at toy sizes")
    record = {"machine": machine(), "rows": []}
    print(record["machine"], flush=True)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    for row in rows(options):
        record["rows"].append(row)
        print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))
