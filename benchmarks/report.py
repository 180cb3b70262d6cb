"""Write the record of benchmarks/attention.py as Markdown tables, and check the files that benchmarks write."""

import argparse
import os
from pathlib import Path

FLASH_4, FLASH_4_DETERMINISTIC = "FlashAttention-4", "FlashAttention-4, deterministic"
_ORDER = ("ours", "cuDNN", "FlashAttention-2", FLASH_4, FLASH_4_DETERMINISTIC, "Triton", "fla")
_RATIOS = ("cuDNN", FLASH_4_DETERMINISTIC)  # contenders that the tables divide by


def output_file(text: str) -> Path:
    """Return the path of a file that is written after a measurement, and create its folder. A type for argparse.

    Raises:
        argparse.ArgumentTypeError: If the file cannot be written. The error comes before anything is measured.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"its folder cannot be created: {error.strerror}"
    else:
        if path.is_dir():
            why = "it is a folder"
        elif os.access(path if path.exists() else path.parent, os.W_OK):
            return path
        else:
            why = "there is no permission"
    raise argparse.ArgumentTypeError(f"must be a file that can be written, got {text!r}: {why}")


def markdown(record: dict) -> str:
    """Return a heading, a table for each group, and the notes. record: the content of --json."""
    machine, top = record["machine"], record["ceilings"]
    lines = [f"# Attention, {machine['date']}", ""]
    lines += [described(machine)]
    if top:
        lines += [
            f"Ceilings in this run: matmul 8192^3 bf16 {top['matmul_tflops']:.0f} TFLOP/s "
            f"({top['matmul_sustained_tflops']:.0f} sustained), copy {top['copy_tbytes_per_s']:.2f} TB/s."
        ]
    lines += [
        "TFLOP/s by the causal model count (forward 2 b h L^2 d, backward 2.5 times that, both 3.5 times): medians of",
        "rounds in which all contenders take turns with a cold L2; in brackets sustained. full: mean logit -11, so",
        "nothing is skipped. randn in the dense table: mass_threshold 0, so keys are skipped only after the mass",
        "underflows. W and MHz: during the sustained run of ours.",
        "",
    ]
    groups = list(dict.fromkeys(m["group"] for m in record["measurements"]))
    for group in groups:
        lines += _table(group, [m for m in record["measurements"] if m["group"] == group])
    lines += [f"- {note}" for note in record["notes"]]
    lines += [f"- Idle before: {_sensed(record['idle'])}.", f"- The run took {record['seconds']} s."]
    return "\n".join(lines) + "\n"


def described(machine: dict[str, str]) -> str:
    """Return the result of timing.machine() as a line."""
    return ", ".join(
        [machine["gpu"], *(f"{k} {machine[k]}" for k in ("driver", "cuda", "cudnn", "torch") if k in machine)]
    )


def _table(group: str, measurements: list[dict]) -> list[str]:
    names = list(dict.fromkeys(m["contender"] for m in measurements))
    names.sort(key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    compared = [name for name in _RATIOS if name in names]
    heading = [group, "inputs", "direction", *(f"{name}" for name in names), "ours ms"]
    heading += [title for name in compared for title in (f"ours / {name}", "sustained")]
    lines = [f"| {' | '.join([*heading, 'W', 'MHz'])} |", "| --- | --- | --- |" + " ---: |" * (len(heading) - 1)]
    rows = list(dict.fromkeys((m["shape"], m["inputs"], m["direction"]) for m in measurements))
    for row in rows:
        found = {m["contender"]: m for m in measurements if (m["shape"], m["inputs"], m["direction"]) == row}
        our = next((m for name, m in found.items() if name.startswith("ours")), None)
        cells = [*row, *(_rate(found.get(name)) for name in names), f"{our['ms']:.3f}" if our else "-"]
        for name in compared:
            cells += [_ratio(our, found.get(name), key) for key in ("tflops", "sustained_tflops")]
        cells += [f"{our[key]:.0f}" if our and our[key] else "-" for key in ("watts", "sm_mhz")]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _rate(measurement: dict | None) -> str:
    if measurement is None:
        return "-"
    steady = measurement["sustained_tflops"]
    return f"{measurement['tflops']:.0f}" + (f" ({steady:.0f})" if steady else "")


def _ratio(ours: dict | None, theirs: dict | None, key: str) -> str:
    return f"{ours[key] / theirs[key]:.2f}x" if ours and theirs and ours[key] and theirs[key] else "-"


def _sensed(values: dict) -> str:
    return ", ".join(f"{value:.0f} {name}" for name, value in values.items()) or "not read"
