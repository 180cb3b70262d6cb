"""The main function of benchmarks that print one table."""

import argparse
import json
from collections.abc import Callable, Iterable

from arguments import seconds as number_of_seconds
from report import output_file
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
    """Parse the arguments, measure the rows, print each as a line of a Markdown table, and write them all.

    A run that is stopped, or whose next row does not fit the memory, writes the rows so far.

    Args:
        doc: docstring of the benchmark. Its first line is the description in --help.
        args: command line; None: sys.argv.
        heads: titles of the columns.
        rows: measures and yields the rows.
        line: formats a row.
        seconds: default of --seconds.
        add_arguments: adds options of the benchmark.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument(
        "--seconds",
        type=number_of_seconds,
        default=seconds,
        help="device time for the rounds of a line (default: %(default)s)",
    )
    parser.add_argument("--json", type=output_file, help="file for all measurements (default: none)")
    parser.add_argument(
        "--dry-run", action="store_true", help="try this script at toy sizes without a GPU (default: off)"
    )
    add_arguments(parser)
    options = parser.parse_args(args)
    if not on_gpu() and not options.dry_run:
        parser.error("torch sees no GPU. Use --dry-run to try this script at toy sizes.")
    record = {"machine": machine(), "rows": []}
    print(record["machine"], flush=True)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    try:
        for row in rows(options):
            record["rows"].append(row)
            print(line(row), flush=True)
    finally:
        if options.json:
            options.json.write_text(json.dumps(record, indent=1))
