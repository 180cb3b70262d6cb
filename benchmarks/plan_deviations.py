"""Compare the predictions of `megatron-sb plan` with records of training: memory and tokens/s.

python benchmarks/plan_deviations.py

The records are of one and two H200s, 2026-11-22. Those of the layouts do not say which share of the attention's work
was saved: rows held several documents, and tiles were skipped. For them the script shows two predictions: nothing
saved, and a share that was chosen so that one GPU has its measured speed. The rates of the prediction were fitted to
these records.

The rates were not fitted to two later records, of one and four H100s with Megatron-LM and Transformer Engine,
2026-11-26 and 27. They test the prediction, on another GPU and with other kernels for all but the attention.
"""

import argparse
import dataclasses
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_sb.planning.layouts import Layout
from megatron_sb.planning.memory import predict_memory
from megatron_sb.planning.throughput import can_predict, predict_step
from megatron_sb.training.config import load_config

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TEXT = [
    "model.num_parameters=null",
    "model.make_vocab_size_divisible_by=128",
    "data={kind: text, paths: [python-stdlib]}",
    "evaluation={windows: 1, target_tokens: 256, length_factor: 1}",
]
ONE_RANK = ["parallel.ranks=1", "parallel.expert_parallel_size=1"]
TRAINING = {  # first column of the table in 2026-11-22-h200-training.md -> file, overrides
    "1B, 24 heads of 64": ("dense_1b", []),
    "1B, 12 heads of 128": ("dense_1b", ["model.num_heads=12", "model.num_kv_heads=12", "model.head_dim=128"]),
    "350M, 16 heads of 64": ("dense_350m", []),
}
LAYOUTS = {  # record -> file, overrides, rows of a step, saved share that the speed of one GPU implies
    "dense-16k": ("dense_350m", TEXT, 2, 0.95),
    "dense-64k": ("dense_350m", [*TEXT, "model.num_layers=12"], 2, 0.97),
    "moe-16k": ("moe_6_5b", [*TEXT, *ONE_RANK, "model.num_layers=10", "model.moe.num_experts=16"], 2, 0.0),
}
UNSEEN = ("2026-11-26-h100-transformer-engine-training.json", "2026-11-27-4xh100-transformer-engine-training.json")
TOKENS, TOKENS_AT_ONCE = 65536, 16384  # of the training record
RECOMPUTED_FROM = 65536


@dataclass(frozen=True)
class Row:
    """A prediction beside its measurement.

    Attributes:
        what: the model and the length of its rows.
        layout: its layout, in the words of the record.
        skipped: share of the attention's work that is saved.
        source: "counted" if the record has the share, "none" if it is 0 by default, "implied" by one GPU's speed.
        gib: predicted memory of a GPU, and the measured one, in GiB. None if the record lacks it.
        rate: predicted tokens/s, and the measured ones. None without a prediction or a valid measurement.
    """

    what: str
    layout: str
    skipped: float
    source: str
    gib: tuple[float, float] | None
    rate: tuple[float, float] | None


def predict(name: str, overrides: list[str], stage: int, fields: dict, layout: Layout, skipped: float) -> tuple:
    """Return the predicted GiB and tokens/s (None for a mixture). fields: of the stage, to replace."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    changed = dataclasses.replace(config.stages[stage], **fields)
    sizes = config.model, config.attention["stick_breaking"], config.vocab_size
    gib = predict_memory(*sizes, changed, layout).total / 2**30
    if can_predict(config.model) is not None:
        return gib, None
    seconds = predict_step(*sizes, changed, layout, skipped).total
    return gib, changed.rows_per_step * changed.context_length / seconds


def training_rows() -> Iterator[Row]:
    """Yield the rows of the training record, without those that were measured again. Nothing was skipped."""
    model = None
    for line in (RESULTS / "2026-11-22-h200-training.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        model = cells[0] if cells[0] in TRAINING else model if cells[0] == "" else None
        length = re.match(r"(\d+)K(?! again)", cells[1]) if model and len(cells) > 7 else None
        if length is None:
            continue
        tokens = 1024 * int(length[1])
        recompute = "full" if tokens >= RECOMPUTED_FROM else "none"
        layout = Layout(rows_at_once=max(1, TOKENS_AT_ONCE // tokens), recompute=recompute)
        fields = {"context_length": tokens, "rows_per_step": TOKENS // tokens}
        gib, rate = predict(*TRAINING[model], 0, fields, layout, 0.0)
        words = "1 GPU" if recompute == "none" else "1 GPU, recomputed"
        measured = float(cells[2].replace(",", ""))
        yield Row(f"{model}, {length[1]}K", words, 0.0, "counted", (gib, float(cells[7])), (rate, measured))


def layout_rows() -> Iterator[Row]:
    """Yield the rows of the layouts record. Layouts of four ranks shared two GPUs, so their times are not valid."""
    for record, (name, overrides, rows, implied) in LAYOUTS.items():
        measured = json.loads((RESULTS / f"2026-11-22-2xh200-layouts-{record}.json").read_text())
        for row in measured["rows"]:
            if "gib" not in row:
                continue
            sizes = {kind: int(count) for kind, count in re.findall(r"\b(TP|CP|EP)(\d+)", row["layout"])}
            at_once = 2 if "again" in row["layout"] else 1
            layout = Layout(sizes.get("TP", 1), sizes.get("CP", 1), 1, sizes.get("EP", 1), at_once)
            fields = {"context_length": row["length"], "rows_per_step": rows}
            for skipped, source in {0.0: "none", implied: "implied"}.items() if implied else ((0.0, "none"),):
                gib, rate = predict(name, overrides, 0, fields, layout, skipped)
                pair = (rate, row["tokens_per_second"]) if rate and row["machines"] == 1 else None
                memory = (gib, row["gib"]) if source == "none" else None
                what = record.replace("-", ", ").replace("k", "K").replace("moe", "mixture")
                if pair or memory:
                    yield Row(what, row["layout"], skipped, source, memory, pair)


def extension_rows() -> Iterator[Row]:
    """Yield the two stages of the context extension. Its record has no memory, and counts tiles in the first stage."""
    record = json.loads((RESULTS / "2026-11-22-2xh200-context-extension.json").read_text())
    steps = record["models"]["stick_breaking"]["steps"]
    layouts = {"short": Layout(data=2, rows_at_once=32), "extended": Layout(context=2, rows_at_once=4)}
    counted = [step["skipped_tiles"] for step in steps if step["skipped_tiles"] is not None]
    for index, (stage, layout) in enumerate(layouts.items()):
        rate = statistics.median(step["tokens_per_second"] for step in steps if step["stage"] == stage)
        skipped, source = (counted[-1], "counted") if stage == "short" else (0.0, "none")
        _, predicted = predict("context_extension_38m", [], index, {}, layout, skipped)
        words = "DP2" if layout.data > 1 else "CP2"
        yield Row(f"38M, {stage}", words, skipped, source, None, (predicted, rate))


def unseen_runs() -> Iterator[tuple[str, dict]]:
    """Yield the name of the model, and each run of the unseen records with a dense model beside cuDNN."""
    for file in UNSEEN:
        record = json.loads((RESULTS / file).read_text())
        for run in record.get("runs") or record.values():
            arguments = run["arguments"]
            if int(arguments.get("experts", 0)) or arguments["peers"] != "['cudnn']":
                continue
            sizes = Path(arguments["config"]).stem.removeprefix("dense_").upper()
            heads = {"1B": "24 heads of 64", "350M": "16 heads of 64"}[sizes]
            yield f"{sizes}, {heads if arguments['set'] == '[]' else '12 heads of 128'}", run


def unseen_rows() -> Iterator[Row]:
    """Yield the rows of the unseen records. Nothing was skipped; on four GPUs this was not counted."""
    for model, run in unseen_runs():
        arguments = run["arguments"]
        tensor, context = (int(arguments.get(f"{kind}_parallel", 1)) for kind in ("tensor", "context"))
        words = " ".join(f"{kind}{size}" for kind, size in (("TP", tensor), ("CP", context)) if size > 1) or "1 GPU"
        for row in run["rows"]:
            if row["contender"] != "stick-breaking":
                continue
            recompute = "full" if row["recompute"] else "none"
            layout = Layout(tensor, context, rows_at_once=row["rows_at_once"], recompute=recompute)
            fields = {"context_length": row["length"], "rows_per_step": row["tokens"] // row["length"]}
            gib, rate = predict(*TRAINING[model], 0, fields, layout, 0.0)
            source = "none" if row["skipped"] is None else "counted"
            what, how = f"{model}, {row['length'] // 1024}K", words + (", recomputed" if row["recompute"] else "")
            yield Row(what, how, 0.0, source, (gib, row["gib"]), (rate, row["tokens_per_second"]))


def rows() -> list[Row]:
    """Return every comparison with the records that the rates were fitted to."""
    return [*training_rows(), *layout_rows(), *extension_rows()]


def off(pair: tuple[float, float] | None) -> float:
    """Return the relative deviation of a prediction; 0 without one."""
    return pair[0] / pair[1] - 1 if pair else 0.0


def lines(found: list[Row]) -> list[str]:
    """Return the comparisons as lines of a Markdown table."""
    table = [
        "| model, length | layout | attention saved | GiB | measured | off | tokens/s | measured | off |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        memory = (f"{row.gib[0]:.1f}", f"{row.gib[1]:.1f}", f"{off(row.gib):+.1%}") if row.gib else ("", "", "")
        rate = (f"{row.rate[0]:,.0f}", f"{row.rate[1]:,.0f}", f"{off(row.rate):+.0%}") if row.rate else ("", "", "")
        skipped = f"{row.skipped:.0%}, {row.source}" if row.source != "none" else "0%, not recorded"
        table.append(f"| {' | '.join((row.what, row.layout, skipped, *memory, *rate))} |".replace("|  ", "| "))
    return table


def main() -> None:
    """Print both tables."""
    print("\n".join([*lines(rows()), "", "Unseen:", "", *lines(list(unseen_rows()))]))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    main()
