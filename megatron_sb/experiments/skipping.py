"""Tiles that a trained model's attention skips, and the time that saves, by layer and head and by context length,
forward and backward (Tan et al., arXiv 2410.17980, section 4.1).

A tile is 64 queries by 64 keys of a head; it is skipped where all of its queries are used up before they reach it.
Times are of one layer's attention for one window of validation text: with the model's mass_threshold, with 0, which
leaves out only what cannot contribute in the arithmetic's precision, and, every tile, of queries and keys as large that
leave nearly all of every stick.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_sb.experiments import sweep, tables, trained
from megatron_sb.training.config import ConfigError, TrainingConfig, load_config

PASSES = ("forward", "backward")
CASES = ("the model's threshold", "0", "every tile")
_LEAST_SECONDS = 2e-3  # of one measurement: a call alone would count the device's waking
_LEAST_ROUNDS = 5
_WHOLE_STICK_LOGIT = -11.0  # a quarter of the stick is left by 64K keys of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside those of every experiment."""
    parser.add_argument(
        "--model", metavar="NAME", help="of the configuration's compare (default: its first with sticks)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.2, metavar="S", help="of measuring for each time (default 0.2)"
    )


def run(options: argparse.Namespace) -> int:
    """Train unless CONFIG is that of a finished run, measure at every evaluated length, write table and picture; 0."""
    config = load_config(options.config, options.set)
    model = _chosen_model(config, options.model)
    if not options.seconds > 0:
        raise ValueError(f"--seconds is {options.seconds}; a number greater than 0 is allowed")
    alone = trained.on_one_rank(config)
    folder = trained.trained_run(options, config)
    with trained.threads(alone.parallel.threads_per_rank), trained.trained_engine(folder, alone, model) as engine:
        entries, device = measure(engine, alone, options.seconds), trained.device_of(alone)
    results = {"model": model, "mass_threshold": alone.attention[model].mass_threshold, "entries": entries}
    tables.write_results(sweep.output_folder(options), results, table(entries), draw(entries), device)
    return 0


def _chosen_model(config: TrainingConfig, wanted: str | None) -> str:
    able = [name for name in trained.plain_sticks(config) if config.attention[name].mass_threshold]
    if config.data.kind == "recall":
        raise ConfigError("data.kind is 'recall'; skipping needs text")
    if not able or (wanted or able[0]) not in able:
        raise ConfigError(
            f"--model is {wanted!r}; the stick-breaking models of compare with a mass_threshold above 0, without gates "
            f"and Euclidean logits, are allowed: {able}"
        )
    return wanted or able[0]


def measure(engine: Any, config: TrainingConfig, seconds: float) -> list[dict[str, Any]]:
    """One entry per context length and layer: {"context", "layer" (from 1), "skipped" (of each head, the mean over
    windows), "windows", "milliseconds" (by pass, of each of CASES)}.
    """
    from megatron_sb.megatron.statistics import skipped_share
    from megatron_sb.training.data import load_corpus, pack
    from megatron_sb.training.evaluate import choose_windows

    corpus = load_corpus(config)
    windows = choose_windows(corpus, config)
    entries = []
    for context in config.evaluation_lengths(config.stages[-1]):
        shares: dict[int, list[np.ndarray]] = {}
        times: dict[int, dict[str, list[float]]] = {}

        def look(core: Any, *call: Any, shares: Any = shares, times: Any = times) -> None:
            layer = core.layer_number
            shares.setdefault(layer, []).append(skipped_share(core, *call).cpu().numpy())
            if layer not in times:
                times[layer] = time_layer(core, *call, seconds=seconds)

        for window in windows:
            part = window[-context - 1 :]
            engine.watch_attention(pack([part], 1, corpus.end_of_document), look)
        for layer, found in sorted(shares.items()):
            skipped = np.mean(found, axis=0).tolist()
            about = {"context": context, "layer": layer, "windows": len(windows)}
            entries.append(about | {"skipped": skipped, "milliseconds": times[layer]})
    return entries


def time_layer(
    core: Any, query: Any, key: Any, value: Any, packed_seq_params: Any, *, seconds: float
) -> dict[str, list[float]]:
    """Median milliseconds of one call's forward and backward, of each of CASES. The gradient of the output is normal,
    the same for all.
    """
    import torch

    from megatron_sb.ops import stickbreaking_attention_varlen

    bounds = packed_seq_params.cu_seqlens_q
    generator = torch.Generator(device=query.device).manual_seed(0)
    d_o = torch.randn(*query.shape[:-1], value.shape[-1], generator=generator, device=query.device, dtype=query.dtype)
    unbroken = [torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) for x in (query, key)]
    unbroken[0][..., 0], unbroken[1][..., 0] = 4.0, _WHOLE_STICK_LOGIT / (4.0 * core.scale)
    own = core.attention_options
    cases = [(query, key, own), (query, key, {**own, "mass_threshold": 0.0}), (*unbroken, own)]
    calls: dict[str, list[Callable[[], Any]]] = {name: [] for name in PASSES}
    for q, k, settings in cases:
        tensors = [x.detach().clone().requires_grad_() for x in (q, k, value)]
        forward = functools.partial(stickbreaking_attention_varlen, *tensors, bounds, **settings)
        with torch.enable_grad():
            o = forward()
        calls["forward"].append(torch.no_grad()(forward))
        calls["backward"].append(functools.partial(torch.autograd.grad, o, tensors, d_o, retain_graph=True))
    return {name: _median_ms(calls[name], seconds) for name in PASSES}


def _median_ms(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Median milliseconds of each call, taken in turns, so that what else the machine does hits all alike."""
    import torch
    from torch.utils.benchmark import Timer

    timers = [Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads()) for call in calls]
    first = [timer.timeit(2).mean for timer in timers]
    repeats = max(1, int(_LEAST_SECONDS / max(first)))
    rounds = max(_LEAST_ROUNDS, int(seconds / (repeats * max(first))))
    taken = [[timer.timeit(repeats).mean for timer in timers] for _ in range(rounds)]
    return (1e3 * np.median(taken, axis=0)).tolist()


def saved(milliseconds: Sequence[float]) -> list[float]:
    """The share of the time with a threshold of 0 and of that of every tile that the model's threshold saves."""
    own, *others = milliseconds
    return [1 - own / other for other in others]


def table(entries: Sequence[dict[str, Any]]) -> str:
    """Two in Markdown: all layers by context length, and every layer at the longest."""
    by_context = []
    contexts = sorted({entry["context"] for entry in entries})
    for context in contexts:
        here = [entry for entry in entries if entry["context"] == context]
        sums = {name: np.sum([entry["milliseconds"][name] for entry in here], axis=0).tolist() for name in PASSES}
        by_context.append([str(context), f"{np.mean([entry['skipped'] for entry in here]):.1%}", *_times(sums)])
    times = [word for name in PASSES for word in (f"{name}, ms: {' / '.join(CASES)}", "saved of the last two")]
    text = tables.markdown_table(["context", "tiles skipped, all layers", *times], by_context)
    by_layer = []
    for entry in (entry for entry in entries if entry["context"] == contexts[-1]):
        heads = entry["skipped"]
        cells = [f"{np.mean(heads):.1%}", f"{min(heads):.1%} to {max(heads):.1%}"]
        by_layer.append([str(entry["layer"]), *cells, *_times(entry["milliseconds"])])
    heads = [f"layer, at {contexts[-1]}", "tiles skipped", "by head", *times]
    return text + "\n" + tables.markdown_table(heads, by_layer)


def _times(milliseconds: dict[str, Sequence[float]]) -> list[str]:
    cells = []
    for name in PASSES:
        cells.append(" / ".join(f"{case:.3g}" for case in milliseconds[name]))
        cells.append(" / ".join(f"{share:.1%}" for share in saved(milliseconds[name])))
    return cells


def draw(entries: Sequence[dict[str, Any]]) -> Any:
    """At the longest context, tiles skipped by layer and head and time saved by layer; both by context length."""
    from megatron_sb.training.plots import pyplot

    contexts = sorted({entry["context"] for entry in entries})
    longest = [entry for entry in entries if entry["context"] == contexts[-1]]
    figure, (heat, bars, lines) = pyplot.subplots(1, 3, figsize=(14, 5))
    layers = [entry["layer"] for entry in longest]
    shares = np.array([entry["skipped"] for entry in longest])
    image = heat.imshow(100 * shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    heat.set_xticks(range(shares.shape[1]), range(1, shares.shape[1] + 1))
    heat.set_yticks(range(len(layers)), layers)
    heat.set(xlabel="head", ylabel="layer", title=f"tiles skipped at {contexts[-1]} (%)")
    figure.colorbar(image)
    for index, name in enumerate(PASSES):
        sums = [
            np.sum([entry["milliseconds"][name] for entry in entries if entry["context"] == context], axis=0)
            for context in contexts
        ]
        for other, style in enumerate((":", "-")):
            label = f"{name}, of {('a threshold of 0', 'every tile')[other]}"
            look = {"color": f"C{index}", "alpha": 0.5 + 0.5 * other}
            by_layer = [100 * saved(entry["milliseconds"][name])[other] for entry in longest]
            bars.bar(np.array(layers) + 0.2 * (2 * index + other) - 0.3, by_layer, 0.2, label=label, **look)
            lines.plot(contexts, [100 * saved(times)[other] for times in sums], "o" + style, label=label, **look)
    skipped = [np.mean([entry["skipped"] for entry in entries if entry["context"] == c]) for c in contexts]
    lines.plot(contexts, 100 * np.array(skipped), "s--", color="grey", label="tiles skipped")
    lines.set_xscale("log", base=2)
    lines.set_xticks(contexts, contexts)
    bars.set(xlabel="layer", xticks=layers, title=f"time saved at {contexts[-1]} (%)")
    lines.set(xlabel="context (tokens)", title="all layers (%)")
    for axes in (bars, lines):
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
        axes.grid(alpha=0.3)
    return figure
