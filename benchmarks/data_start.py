"""Measure how long a job with many documents takes to read its first rows, and the memory that this needs.

    python benchmarks/data_start.py FOLDER --documents 100000000

Writes a data set (.bin/.idx) of that many documents into FOLDER. The tokens are a sparse file, which takes no room on
the disk. The first start builds the index, the second finds it. Each start is a process of its own. Prints seconds, CPU
seconds, the memory of the process after its imports and at its peak, and how much of it at the end is not mapped from
files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from arguments import output_folder, whole_number

from megatron_sb.training.config import load_config

CONFIG = Path(__file__).parents[1] / "configs" / "tiny_context_extension.yaml"
CHUNK = 2**20
END_OF_DOCUMENT = 0  # a sparse file reads as zeros
UINT16_CODE = 8
ROWS = 64


def write_data_set(prefix: Path, num_documents: int, mean_tokens: int) -> None:
    """Write a data set of documents of random length, of one sequence each, whose tokens are all 0."""
    generator = np.random.default_rng(0)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, UINT16_CODE, num_documents, num_documents + 1))
        pieces, total = [], 0
        for first in range(0, num_documents, CHUNK):
            lengths = generator.geometric(1 / mean_tokens, min(CHUNK, num_documents - first)).astype(np.int32)
            file.write(lengths.tobytes())
            pieces.append(lengths)
        for lengths in pieces:
            ends = total + np.cumsum(2 * lengths, dtype=np.int64)
            file.write((ends - 2 * lengths).tobytes())
            total = int(ends[-1])
        for first in range(0, num_documents + 1, CHUNK):
            file.write(np.arange(first, min(first + CHUNK, num_documents + 1), dtype=np.int64).tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(total)


def start(prefix: Path, mean_tokens: int) -> dict[str, float]:
    """Load the data as a rank of a job does, and read its first rows. Imports are not measured."""
    from megatron_sb.megatron import indexed_documents  # noqa: F401
    from megatron_sb.training.task import load_task

    data = f"{{kind: indexed, paths: [{prefix}], vocab_size: 8, end_of_document: {END_OF_DOCUMENT}}}"
    context = 16 * mean_tokens
    fields = {"name": "all", "context_length": context, "rows_per_step": ROWS, "learning_rate": 1e-3}
    stages = json.dumps([{**fields, "steps": 10**4}])
    overrides = [f"data={data}", f"stages={stages}", f"evaluation={{target_tokens: 8, longest: {4 * mean_tokens}}}"]
    config = load_config(CONFIG, overrides)
    before = time.perf_counter(), time.process_time(), _peak_mib()
    task = load_task(config)
    sampler = task.sampler(config.stages[0], 0)
    rows = [sampler.read(row) for row in sampler.next_rows(ROWS)]
    assert len(rows) == ROWS
    return {
        "seconds": time.perf_counter() - before[0],
        "cpu_seconds": time.process_time() - before[1],
        "mib_before": before[2],
        "peak_mib": _peak_mib(),
        "anonymous_mib": _anonymous_mib(),
        **task.fingerprint(),
    }


def _peak_mib() -> float:
    return _status_mib("VmHWM")  # the peak of getrusage starts at that of the parent process


def _anonymous_mib() -> float:
    return _status_mib("RssAnon")


def _status_mib(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) / 1024


def main() -> None:
    """Write the data set and start twice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=output_folder, metavar="FOLDER", help="for the data set")
    parser.add_argument(
        "--documents", type=whole_number(1000), default=10**6, help="number of documents (default: %(default)s)"
    )
    parser.add_argument("--mean-tokens", type=whole_number(3), default=100, help="of a document (default: %(default)s)")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prefix = options.folder / f"sparse-{options.documents}-{options.mean_tokens}"
    if options.start:
        print(json.dumps(start(prefix, options.mean_tokens)))
        return
    write_data_set(prefix, options.documents, options.mean_tokens)
    shutil.rmtree(options.folder / "megatron_sb_index", ignore_errors=True)
    for name in ("first", "second"):
        command = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--start"]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ).stdout
        print(f"{name} start: {output.splitlines()[-1]}", flush=True)
    files = [path for path in (options.folder / "megatron_sb_index").rglob("*") if path.is_file()]
    print(f"index: {sum(path.stat().st_size for path in files) / 2**20:.0f} MiB in {len(files)} files")


if __name__ == "__main__":
    main()
