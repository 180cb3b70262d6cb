"""Predicted memory and speed agree with records of training, and follow the layout as they must."""

import importlib
import itertools
import json
import math
import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.messages import mentions

from megatron_sb import cli
from megatron_sb.planning import command, context_parallel, layouts, memory, throughput
from megatron_sb.planning.layouts import Layout
from megatron_sb.training.config import load_config

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
DENSE = CONFIGS / "dense_1b.yaml"


@pytest.fixture(scope="module")
def script():
    """benchmarks/plan_deviations.py, which is not in a package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("plan_deviations")
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def rows(script):
    return script.rows()


def test_memory_agrees_with_the_records(script, rows):
    compared = [row for row in rows if row.gib]
    assert len(compared) == 9 + 14
    for row in compared:
        assert abs(script.off(row.gib)) < (0.07 if row.what.startswith("mixture") else 0.02), row


def test_tokens_per_second_agree_with_the_records(script, rows):
    """With the counted share of the attention, or the one that one GPU implies. Without it, the deviation is larger."""
    largest = {"counted": 0.0, "implied": 0.0, "none": 0.0}
    for row in rows:
        largest[row.source] = max(largest[row.source], abs(script.off(row.rate)))
    assert 0.05 < largest["counted"] < 0.25 and largest["implied"] < 0.07
    assert largest["none"] > 0.25  # which docs/planning.md says
    training = [row for row in rows if row.what.startswith(("1B", "350M"))]
    assert len(training) == 9 and max(abs(script.off(row.rate)) for row in training) < 0.05


def test_unseen_records_are_predicted(script):
    """As docs/planning.md says: Transformer Engine needs less memory, above all where layers are recomputed."""
    unseen = list(script.unseen_rows())
    assert {row.layout.partition(",")[0] for row in unseen} == {"1 GPU", "CP4", "TP2 CP2"} and len(unseen) == 13
    for row in unseen:
        assert abs(script.off(row.rate)) < (0.12 if row.what == "1B, 12 heads of 128, 4K" else 0.055), row
        assert 0.02 < script.off(row.gib) < (0.21 if "recomputed" in row.layout else 0.04), row


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 128), (24, 64)])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gated", {"forget_gate": True}),
        ("euclidean", {"logits": "euclidean"}),
        ("gated euclidean", {"forget_gate": True, "logits": "euclidean"}),
    ],
)
def test_variants_of_the_logit_take_the_measured_times(name, fields, heads, head_dim):
    """Two rows of 16K, forward and backward, as a multiple of plain attention."""
    measured = json.loads((ROOT / "benchmarks/results/2026-11-28-h200-variants.json").read_text())["rows"]
    shape = f"b=2 h={heads} d={head_dim} L=16384"
    (ms,) = (row["ms"] for row in measured if row["shape"] == shape and row["direction"] == "both")
    sizes = [f"model.num_heads={heads}", f"model.num_kv_heads={heads}", f"model.head_dim={head_dim}"]
    config = load_config(DENSE, [*sizes, "model.num_parameters=null"])
    plain = config.attention["stick_breaking"]
    stage = replace(config.stages[0], context_length=16384)

    def seconds(attention):
        return throughput.attention_seconds(config.model, attention, stage, Layout(rows_at_once=2), 0.0)

    assert seconds(replace(plain, **fields)) / seconds(plain) == pytest.approx(ms[name] / ms["plain"], rel=0.02)


def test_the_documentation_has_the_deviations(script, rows):
    page = (ROOT / "docs/planning.md").read_text()
    for line in (*script.lines(rows), *script.lines(list(script.unseen_rows()))):
        assert line in page, line


def predictions(layout, config=None, skipped=0.0):
    config = config or load_config(DENSE)
    stage = replace(config.stages[0], context_length=16384, rows_per_step=64)
    sizes = config.model, config.attention["stick_breaking"], config.vocab_size, stage, layout
    return memory.predict_memory(*sizes), throughput.predict_step(*sizes, skipped)


def test_memory_of_weights_is_that_of_the_distributed_optimizer():
    """18 bytes a weight on one GPU, 6 + 12 / n on n data- and context-parallel ones, 18 / n on n tensor-parallel."""
    weights = 1208083968

    def of_weights(layout):
        found, _ = predictions(layout)
        return found.weights + found.gradients + found.optimizer

    assert of_weights(Layout()) == 18 * weights
    for layout in (Layout(data=8), Layout(context=8), Layout(context=2, data=4)):
        assert of_weights(layout) == pytest.approx((6 + 12 / 8) * weights)
    assert of_weights(Layout(tensor=4)) == pytest.approx(18 / 4 * weights)
    assert of_weights(Layout(tensor=2, data=3)) == pytest.approx((6 + 12 / 3) / 2 * weights)


def test_activations_are_megatrons_count():
    """16 hidden + 6 ffn bytes for each token and layer, and the mass of each head. Recomputed: the input."""
    (found, _), tokens = predictions(Layout(rows_at_once=2)), 2 * 16384
    assert found.activations == 40 * tokens * (16 * 1536 + 6 * 4096 + 4 * 24)
    assert predictions(Layout(rows_at_once=2, recompute="full"))[0].activations == 40 * tokens * 2 * 1536
    assert predictions(Layout(rows_at_once=2, context=4))[0].activations == found.activations / 4
    assert predictions(Layout(rows_at_once=2, tensor=4))[0].activations == found.activations / 4


LONG = ("model.recompute=full", "model.tokens_at_once=16384", "model.offloaded_inputs=26", "model.num_heads=12")


@pytest.mark.parametrize(("length", "gib"), [(65536, 28.2), (131072, 31.4), (262144, 40.9), (1048576, 102.0)])
def test_memory_of_long_sequences_agrees_with_the_record(length, gib):
    """benchmarks/results/2026-11-27-h200-long-sequences.md: MLPs and logits in parts, inputs of layers on the host."""
    config = load_config(DENSE, [*LONG, "model.num_kv_heads=12", "model.head_dim=128"])
    stage = replace(config.stages[0], context_length=length)
    sizes = config.model, config.attention["stick_breaking"], config.vocab_size, stage, Layout(recompute="full")
    assert memory.predict_memory(*sizes).total / 2**30 == pytest.approx(gib, rel=0.035)
    assert throughput.can_predict(config.model)  # the record has single steps


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_at_once_count_over_all_rows_of_a_micro_batch(recompute):
    """The trainer packs the rows of a micro-batch into one stream, which it splits: rows share the tokens at once."""
    config = load_config(DENSE, ["model.tokens_at_once=4096", *(["model.recompute=full"] * (recompute == "full"))])
    rows = 4
    packed, _ = predictions(Layout(rows_at_once=rows, recompute=recompute), config)
    row = replace(config.stages[0], context_length=rows * 16384)
    sizes = config.model, config.attention["stick_breaking"], config.vocab_size, row, Layout(recompute=recompute)
    assert packed == memory.predict_memory(*sizes)


def test_layers_that_are_recomputed_together_keep_one_input():
    """The backward then has the activations of all of them at once."""
    kept, every = (predictions(Layout(recompute=name))[0].activations for name in ("full", "none"))
    for together in (4, 40):
        config = load_config(DENSE, ["model.recompute=full", f"model.recompute_layers={together}"])
        found, _ = predictions(Layout(recompute="full"), config)
        assert found.activations == kept / together
        within = 16384 * 2 * (3 * 4096 + 2 * 1536)
        logits = 16384 * 6 * 49152
        assert found.temporary == max(logits, every * together / 40 + within)


def test_what_changes_the_time_of_a_step():
    alone = predictions(Layout())[1]
    again = predictions(Layout(recompute="full"))[1]
    assert again.products > 1.25 * alone.products and again.attention > 1.2 * alone.attention
    assert again.host > 1.2 * alone.host
    shared = predictions(Layout(data=2))[1]
    assert shared.products == alone.products / 2 and shared.attention == pytest.approx(alone.attention / 2)
    assert alone.transfers == 0 < shared.transfers < predictions(Layout(tensor=2))[1].transfers
    saved = predictions(Layout(), skipped=0.5)[1]
    assert 0.45 * alone.attention < saved.attention < 0.6 * alone.attention
    assert {**asdict(saved), "attention": 0} == {**asdict(alone), "attention": 0}
    assert predictions(Layout(rows_at_once=4))[1].host == alone.host / 4
    unaligned = load_config(DENSE, ["model.ffn_hidden_size=4098", "model.num_parameters=null"])
    assert predictions(Layout(), unaligned)[1].products > 1.5 * alone.products


def test_context_parallelism_divides_the_attention():
    times = [predictions(Layout(context=n))[1].attention for n in (1, 2, 4, 8)]
    assert all(before / 2 < after < before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("name", ["dense_1b", "moe_6_5b"])
def test_every_layout_is_a_configuration_that_the_trainer_accepts(name):
    """Each has the wanted number of GPUs, and its overrides make the configuration."""
    path = CONFIGS / f"{name}.yaml"
    config = load_config(path)
    found = list(layouts.find_layouts(config, config.stages[0], 8))
    assert {layout.gpus for layout in found} == {8} and len(set(found)) == len(found)
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
    assert {layout.context for layout in found} == {1, 2, 4, 8}
    assert {layout.expert for layout in found} == ({1} if name == "dense_1b" else {1, 2, 4, 8})
    for layout in found[:: len(found) // 9]:
        changed = load_config(path, layouts.overrides(config, 0, layout))
        assert changed.data_parallel_size(changed.stages[0]) == layout.data
        assert changed.stages[0].rows_per_micro_batch == layout.rows_at_once
        assert (changed.model.recompute, changed.parallel.ranks) == (layout.recompute, 8)
        assert changed.parallel.sequence_parallel == (layout.tensor > 1)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_train_accepts_the_printed_command(path, capsys):
    """For every stage of every shipped configuration, and every number of GPUs of a host."""
    printed = 0
    for stage in load_config(path).stages:
        for gpus in range(1, 9):
            words = ["plan", "--config", str(path), "--stage", stage.name, "--memory", "1000", "--gpus", str(gpus)]
            status, shown = cli.main(words), capsys.readouterr()
            if status == 2:  # no stick-breaking model, fp32, or no layout: test_bad_arguments_are_one_sentence
                assert shown.err
                continue
            found = shlex.split(shown.out.splitlines()[-1].removeprefix("The first layout: "))
            assert found[:3] == ["megatron-sb", "train", str(path)]
            changed = load_config(path, [word.removeprefix("--set=") for word in found[3:]])
            assert changed.parallel.ranks == gpus
            printed += 1
    assert printed >= {"context_extension_1b": 8, "dense_1b": 8, "moe_6_5b": 8}.get(path.stem, 0)


@pytest.mark.parametrize(
    "fields",
    [
        ["stages.0.rows_per_step=2"],  # the file has 8 GPUs for these rows
        ["parallel.tensor_parallel_size=7", "parallel.ranks=5", "stages.1.rows_per_micro_batch=999"],
        ["parallel.comm=a2a+p2p", "stages.0.context_parallel_size=3"],
    ],
)
def test_the_layout_of_the_file_need_not_be_valid(fields, capsys):
    """A plan finds another one. The trainer accepts the printed command."""
    options = [f"--set={field}" for field in fields]
    assert cli.main(["plan", "--config", str(DENSE), "--gpus", "8", *options]) == 0
    found = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("The first layout: "))
    changed = load_config(DENSE, [word.removeprefix("--set=") for word in found[3:]])
    assert changed.parallel.ranks == 8
    with pytest.raises(ValueError, match="must"):
        load_config(DENSE, fields)


UNLIKE_ANY_LAYOUT = (
    "parallel.comm=a2a+p2p",
    "stages.0.hierarchical_context_parallel_sizes=[2, 1]",
    "stages.1.hierarchical_context_parallel_sizes=[2, 4]",
    "stages.0.pad_multiple=64",
    "stages.1.pad_multiple=16",
    "stages.0.rows_per_micro_batch=16",
    "model.recompute=full",
    "model.recompute_layers=2",
    "model.offloaded_inputs=1",
)


@pytest.mark.parametrize("fields", [(), UNLIKE_ANY_LAYOUT], ids=["as it is", "with other fields"])
def test_overrides_make_the_configuration_of_the_layout(fields):
    """The trainer accepts both stages, whichever is planned. The other one shares its rows between fewer GPUs."""
    path = CONFIGS / "context_extension_1b.yaml"
    config = load_config(path, fields)
    for index, gpus in itertools.product((0, 1), (1, 2, 4, 8, 16)):
        found = list(layouts.find_layouts(config, config.stages[index], gpus))
        assert {layout.recompute for layout in found} == set(layouts.RECOMPUTES)
        for layout in found[:: max(1, len(found) // 6)]:
            changed = load_config(path, [*fields, *layouts.overrides(config, index, layout)])
            expected = layouts.with_layout(config, config.stages[index], layout)
            assert changed == expected and changed.parallel.comm == "auto"
            assert changed.stages[index].context_parallel_size == layout.context
            other = config.stages[1 - index].context_parallel_size
            fitting = math.gcd(other, gpus // layout.tensor)
            assert changed.stages[1 - index].context_parallel_size == fitting
            named = layouts.changes_of_other_stages(config, index, layout)
            if fitting != other:
                assert f"context_parallel_size={fitting}" in named[config.stages[1 - index].name]
            elif not fields:
                assert not named


def test_what_another_stage_keeps():
    """Its padding and micro-batches if they fit. A stage with few rows shares them between more GPUs."""
    path = CONFIGS / "context_extension_1b.yaml"
    fields = ["stages.0.pad_multiple=4", "stages.0.rows_per_micro_batch=64", "stages.0.context_parallel_size=1"]
    fields += ["parallel.ranks=4", "stages.1.context_parallel_size=4"]
    config = load_config(path, fields)

    def first_stage(layout, *more):
        changed = layouts.with_layout(load_config(path, [*fields, *more]), config.stages[1], layout).stages[0]
        return changed.context_parallel_size, changed.pad_multiple, changed.rows_per_micro_batch

    assert first_stage(Layout(data=4)) == (1, 4, 64)
    assert first_stage(Layout(data=8)) == (1, 4, 32)
    assert first_stage(Layout(tensor=8)) == (1, None, 64)
    few = ("stages.0.rows_per_step=2", "stages.0.rows_per_micro_batch=null", "parallel.ranks=2")
    few += ("stages.1.context_parallel_size=2",)
    assert first_stage(Layout(data=2), *few) == (1, 4, None)
    assert first_stage(Layout(data=8), *few) == (4, None, None)


def test_tensor_parallelism_stays_within_a_host():
    """Its transfers need NVLink, so at most 8 GPUs share a layer, also if 16 could."""
    fields = ["model.num_heads=16", "model.num_kv_heads=16", "model.head_dim=128", "model.num_parameters=null"]
    config = load_config(DENSE, fields)
    found = {layout.tensor for layout in layouts.find_layouts(config, config.stages[0], 16)}
    assert found == {1, 2, 4, 8}
    assert layouts.why_rejected(config, config.stages[0], Layout(tensor=16)) is None


def test_fast_layouts_that_fit_come_first():
    config = load_config(DENSE)
    plans = command.make_plans(config, "stick_breaking", config.stages[0], 8, memory_gib=20)
    fits = [plan.fits for plan in plans]
    assert fits == sorted(fits, reverse=True) and set(fits) == {True, False}
    speeds = [plan.tokens_per_second for plan in plans if plan.fits]
    assert all(after < 1.021 * before for before, after in itertools.pairwise(speeds))
    limit = command.MARGIN * 20 * 2**30
    assert all((plan.memory.total <= limit) == plan.fits for plan in plans)
    best = command.best_of_each(plans)
    assert best[0] is plans[0] and len(best) < len(plans)


def plan(*options):
    return cli.main(["plan", "--config", str(DENSE), "--stage", "pretrain", *options])


def test_the_command(capsys):
    assert plan("--gpus", "8") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^TP +CP +DP +EP +rows +recompute .* fits +s/step +tokens/s$", printed, re.M)
    assert "1024 rows of 4,096 tokens a step, 8 GPUs of 140 GiB" in printed
    assert f"The first layout: megatron-sb train {DENSE}" in printed
    assert plan("--gpus", "16") == 0
    assert "upper bound" in capsys.readouterr().out


def test_json_has_the_values_of_the_table(capsys):
    assert plan("--gpus", "2", "--json", "--all") == 0
    found = json.loads(capsys.readouterr().out)
    config = load_config(DENSE)
    plans = command.make_plans(config, "stick_breaking", config.stages[0], 2)
    assert [entry["tokens_per_second"] for entry in found] == [one.tokens_per_second for one in plans]
    assert [entry["memory"]["total"] for entry in found] == [one.memory.total for one in plans]


def test_a_ring_of_many_gpus_is_not_simulated(monkeypatch, capsys):
    """Its time grows with the square of the ranks. A lower bound shows that another mode is faster."""
    simulated = []
    ring = context_parallel.Model._ring
    monkeypatch.setattr(
        context_parallel.Model, "_ring", lambda self, *args: simulated.append(self.ranks) or ring(self, *args)
    )
    assert plan("--gpus", "4096") == 0
    assert simulated and max(simulated) < 256
    for length, ranks in itertools.product((4096, 65536), (1, 2, 8, 64)):
        model = context_parallel.Model(throughput.MACHINES[64], context_parallel.Shape(length, 24, 8, 64), ranks)
        for directions in (("forward",), ("backward",), ("forward", "backward", "forward")):
            assert model.least_ring_time(*directions) <= model.time("p2p", *directions)


def test_no_layout_fits(capsys):
    assert plan("--gpus", "2", "--memory", "10") == 1
    assert "No layout fits" in capsys.readouterr().out


def test_a_mixture_has_memory_and_no_speed(capsys):
    assert cli.main(["plan", "--config", str(CONFIGS / "moe_6_5b.yaml"), "--gpus", "8"]) == 0
    assert "No tokens/s: no kernel rates of experts were recorded." in capsys.readouterr().out


def test_other_stages_that_change_are_named(capsys):
    path = str(CONFIGS / "context_extension_1b.yaml")
    assert cli.main(["plan", "--config", path, "--gpus", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "also changes" in line)
    assert re.search(mentions("extend_16k context_parallel_size=1"), line) and "extend_64k" not in line
    assert cli.main(["plan", "--config", path, "--gpus", "4"]) == 0
    assert "also changes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "0"], "--gpus 1 0"),
        (["--gpus", "100000000000"], "--gpus 1 1048576 100000000000"),
        (["--gpus", "7"], "--gpus 1024 4096 7 stages.0.rows_per_step"),
        (["--gpus", "8", "--memory", "0"], "--memory 0 0.0"),
        (["--gpus", "8", "--memory", "nan"], "--memory 0 nan"),
        (["--gpus", "8", "--skipped", "1"], "--skipped 0 0.999 1.0"),
        (["--gpus", "8", "--stage", "other"], "--stage 'pretrain' 'other'"),
        (["--gpus", "8", "--model", "softmax_rope"], "--model 'stick_breaking' 'softmax_rope'"),
        (["--gpus", "8", "--set", "model.precision=fp32"], "model.precision 'bf16' 'fp32'"),
        (["--gpus", "8", "--set", "model.precision=fp32", "--set", "parallel.device=cpu"], "parallel.device=cuda"),
        (["--gpus", "8", "--set", "model.layers=3"], "model.layers 3"),
    ],
)
def test_bad_arguments_are_one_sentence(options, words, capsys):
    assert plan(*options) == 2
    printed = capsys.readouterr()
    assert len(printed.err.splitlines()) == 1 and not printed.out
    assert re.search(mentions(words), printed.err), printed.err


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gpus": 0}, ValueError, "gpus must be from 1 to 1048576, got 0"),
        ({"gpus": -1}, ValueError, "gpus must be from 1 to 1048576, got -1"),
        ({"gpus": 2.0}, TypeError, r"gpus must be an int, got 2\.0"),
        ({"memory_gib": math.nan}, ValueError, "memory_gib must be a number of GiB above 0, got nan"),
        ({"memory_gib": "80"}, TypeError, "memory_gib must be a number of GiB above 0, got str"),
        ({"skipped": 2}, ValueError, r"skipped must be from 0 to 0\.999, got 2"),
        ({"skipped": math.nan}, ValueError, r"skipped must be from 0 to 0\.999, got nan"),
        ({"model": "softmax_rope"}, ValueError, r"model must be .* one of \['stick_breaking'\], got 'softmax_rope'"),
        ({"model": "other"}, ValueError, r"model must be .* one of \['stick_breaking'\], got 'other'"),
        ({"stage": "pretrain"}, ValueError, r"stage must be one of config\.stages, with the names .*, got 'pretrain'"),
    ],
)
def test_bad_arguments_in_python_are_named(arguments, error, message):
    """Some were a traceback from within, others a wrong prediction."""
    config = load_config(DENSE)
    given = {"model": "stick_breaking", "stage": config.stages[0], "gpus": 1} | arguments
    with pytest.raises(error, match=message):
        command.make_plans(config, **given)


def test_a_stage_of_another_configuration_is_an_error():
    """Its layout would be given to no stage."""
    config = load_config(DENSE)
    stage = replace(config.stages[0], context_length=2 * config.stages[0].context_length)
    with pytest.raises(ValueError, match=r"stage must be one of config\.stages, .* context_length=8192"):
        command.make_plans(config, "stick_breaking", stage, 1)


def test_a_stage_with_a_teacher_is_not_predicted(capsys):
    """Its weights would need memory, and its forward time."""
    teacher = ["teacher=softmax_rope", "initial_checkpoint=x", "initial_attention=softmax", "parallel.ranks=1"]
    fields = [*teacher, "compare=[stick_breaking]", "stages.0.loss=logits"]
    assert plan("--gpus", "1", *(f"--set={field}" for field in fields)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(mentions("loss 'pretrain' 'tokens' 'logits' teacher"), line), line
