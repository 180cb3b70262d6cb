"""Formats without fields for multipliers get weights that contain them, and compute the same logits."""

import json
from pathlib import Path

import pytest
import torch
from support import decoders
from support.decoders import BIASES, EUCLIDEAN, EXPERTS, GATES, HEAD_VECTORS, TO_CONVERT

from megatron_sb import checkpoints, cli
from megatron_sb.checkpoints import multipliers
from megatron_sb.checkpoints.multipliers import FORMATS_WITHOUT_FIELDS, NO_MULTIPLIERS
from megatron_sb.megatron.weights import check_scale_once
from megatron_sb.training.config import load_config, to_yaml
from megatron_sb.training.initial_checkpoint import check_initial_checkpoint

PUBLISHED = {  # of shawntan/stickbreaking-3b
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 9.0,
    "attention_multiplier": 1 / 64,
}
POWERS_OF_TWO = {  # with head_dim 16, whose default scale is 1 / 4
    "embedding_multiplier": 8.0,
    "residual_multiplier": 0.25,
    "logits_scaling": 16.0,
    "attention_multiplier": 1 / 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TIED = {"tie_word_embeddings": True}
VARIANTS = {
    "plain": {},
    "tied": TIED,
    "head vectors": HEAD_VECTORS,
    "experts, tied": EXPERTS | HEAD_VECTORS | TIED,
    "own key, wide heads": {"attend_current": True, "head_dim": 16},
    "biases": BIASES,
    "biases, tied": BIASES | TIED,
    "biases, Euclidean": BIASES | EUCLIDEAN,
    "gates": GATES,
    "gates, Euclidean": GATES | EUCLIDEAN,
}
CASES = [
    *(("megatron", variant) for variant in VARIANTS),
    *(("fla", variant) for variant in ("plain", "tied", "biases", "biases, tied")),
]


def make_model(dtype=torch.float32, **fields):
    return decoders.make_model(dtype, **TO_CONVERT | PUBLISHED | fields)


def converted(model, to, folder):
    """Return the model after conversion to a format and back."""
    checkpoints.save(model, folder / "out", to)
    for name, none in NO_MULTIPLIERS.items():
        setattr(model.config, name, none)
    model.config.save_pretrained(folder / "config")
    return checkpoints.load(folder / "out", folder / "config" if to == "megatron" else None)


def factors_of(model, back):
    """Return the quotient of the weights after and before, for weights that changed. Each has one quotient."""
    before = model.state_dict()
    changed = {name: x for name, x in back.state_dict().items() if not torch.equal(x, before[name])}
    quotients = {name: x.double() / before[name].double() for name, x in changed.items()}
    for name, x in quotients.items():
        torch.testing.assert_close(x, x.mean().expand_as(x), rtol=2**-23, atol=0, msg=name)
    return {name: x.mean().item() for name, x in quotients.items()}


@pytest.mark.parametrize(("to", "variant"), CASES)
def test_the_logits_stay(to, variant, tmp_path):
    """In fp64, they differ by the rounding of weights to fp32."""
    model = make_model(**VARIANTS[variant])
    ids = torch.randint(61, (2, 12))
    expected = model(ids).logits
    exact = model.double()(ids).logits
    model = model.float()
    back = converted(model, to, tmp_path)
    assert all(getattr(back.config, name) == none for name, none in NO_MULTIPLIERS.items())
    assert back.config.tie_word_embeddings == ("tied" in variant)
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == ("tied" in variant)
    torch.testing.assert_close(back(ids).logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(back.double()(ids).logits, exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("fields", [{}, TIED, EXPERTS, BIASES], ids=["plain", "tied", "experts", "biases"])
def test_the_folded_weights(fields, tmp_path):
    """The factors are those of the documentation. Other weights keep their bits."""
    model = make_model(**HEAD_VECTORS, **fields)
    found = factors_of(model, converted(model, "megatron", tmp_path))
    expected = {"model.embed_tokens.weight": 12, "model.norm.weight": 1 / 9}
    if fields == TIED:
        expected |= {"lm_head.weight": 12, "model.norm.weight": 1 / (9 * 12)}
    experts = [f"experts.{number}." for number in range(3)] if fields == EXPERTS else [""]
    for layer in ("model.layers.0", "model.layers.1"):
        for part in ("weight", "bias") if fields == BIASES else ("weight",):
            expected[f"{layer}.self_attn.q_proj.{part}"] = 8**0.5 / 64
        expected[f"{layer}.self_attn.o_proj.weight"] = 0.22
        expected |= {f"{layer}.mlp.{expert}down_proj.weight": 0.22 for expert in experts}
    assert found == pytest.approx(expected, rel=2**-23)


def test_the_folded_scale_of_euclidean_logits(tmp_path):
    """Queries and keys are multiplied by the square root of the scale, which scales their squared distance."""
    model = make_model(**dict.fromkeys(PUBLISHED, 1.0) | GATES | BIASES | EUCLIDEAN)
    found = factors_of(model, converted(model, "megatron", tmp_path))
    parts = [f"self_attn.{x}_proj.{part}" for x in "qk" for part in ("weight", "bias")]
    changed = {f"model.layers.{n}.{part}": 0.05**0.5 for n in range(2) for part in parts}
    assert found == pytest.approx(changed, rel=2**-23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, TIED, BIASES], ids=["untied", "tied", "biases"])
@pytest.mark.parametrize("to", FORMATS_WITHOUT_FIELDS)
def test_powers_of_two_are_exact(to, fields, dtype, tmp_path):
    """Every bit of the logits stays, also in bf16."""
    model = make_model(dtype, **POWERS_OF_TWO, **fields)
    ids = torch.randint(61, (2, 12))
    expected = model(ids).logits
    assert torch.equal(converted(model, to, tmp_path)(ids).logits, expected)


def test_the_default_scale_is_not_folded():
    """An attention_multiplier of 1 / sqrt(head_dim) leaves the query weights, whatever its rounding."""
    for head_dim in (8, 80, 128):
        for scale in (head_dim**-0.5, 1 / head_dim**0.5):
            config = make_model(**dict.fromkeys(PUBLISHED, 1.0) | {"attention_multiplier": scale, "head_dim": head_dim})
            assert multipliers.folded(config.config, "megatron") == {}
    config = make_model(**dict.fromkeys(PUBLISHED, 1.0) | {"logits": "euclidean"}).config
    assert multipliers.folded(config, "megatron") == {}


def test_the_command_says_what_is_folded(tmp_path, capsys):
    """For a format with fields it says nothing."""
    make_model().save_pretrained(tmp_path / "model")
    for to in checkpoints.FORMATS:
        assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / to), "--to", to]) == 0
        line = (
            "Folded into the weights, each rounded once: embedding_multiplier 12, residual_multiplier 0.22, "
            "logits_scaling 9, attention_multiplier 0.015625\n"
        )
        assert capsys.readouterr().out.endswith(line) == (to in FORMATS_WITHOUT_FIELDS)


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        (torch.float32, {"embedding_multiplier": 0.0}, "embedding_multiplier must be finite and not 0 .* fla .* got 0"),
        (torch.float32, {"residual_multiplier": 0.0}, "residual_multiplier must be finite and not 0 .* fla .* got 0"),
        (torch.float16, {"embedding_multiplier": 1e6}, r"embed_tokens.weight times 1e\+06 must be at most 65504 .*16"),
    ],
)
def test_what_cannot_be_folded(dtype, changes, message, tmp_path):
    """The error leaves no file."""
    with pytest.raises(ValueError, match=message):
        checkpoints.save(make_model(dtype, **changes), tmp_path / "out", "fla")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("scale", "problem"), [(-0.5, "greater than 0 with Euclidean logits"), (0.0, "finite and not 0")]
)
def test_scales_of_euclidean_logits_that_cannot_be_folded(scale, problem, tmp_path):
    """No factor of queries and keys changes the sign of a distance."""
    model = make_model(logits="euclidean", attention_multiplier=scale)
    with pytest.raises(ValueError, match=f"attention_multiplier must be {problem} .* megatron format, got {scale}"):
        checkpoints.save(model, tmp_path / "out", "megatron")
    assert not list(tmp_path.iterdir())


def test_multipliers_are_not_applied_twice(tmp_path):
    """The configuration of the model before the fold does not fit a Megatron checkpoint."""
    model = make_model()
    model.config.save_pretrained(tmp_path / "config")
    checkpoints.save(model, tmp_path / "out", "megatron")
    message = r"embedding_multiplier must be 1.0 in the configuration of a megatron checkpoint, got 12.0: .* Remove"
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path / "out", tmp_path / "config")


def test_the_scale_of_a_run_is_not_applied_twice(tmp_path):
    """A conversion folds it. The configuration of the run, which sets it, does not fit the result."""
    configs = Path(__file__).parents[3] / "configs"
    name, scale = "attention.stick_breaking.scale", ["attention.stick_breaking.scale=0.5"]
    config = load_config(configs / "tiny_context_extension.yaml", scale)
    checkpoints.save(make_model(**NO_MULTIPLIERS | {"attention_multiplier": 0.5}), tmp_path / "out", "megatron")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    message = r"must be null for .*out/release, whose weights contain the scale 0\.5 since their conversion, got 0\.5"
    with pytest.raises(ValueError, match=rf"config\.yaml: the scale of the model's attention {message}"):
        checkpoints.load(tmp_path / "out", tmp_path / "config.yaml")
    start = ["compare=[stick_breaking]", f"initial_checkpoint={tmp_path / 'out' / 'release'}"]
    with pytest.raises(ValueError, match=rf"{name} {message}"):
        check_initial_checkpoint(load_config(configs / "tiny_context_extension.yaml", scale + start))
    checkpoints.save(make_model(**NO_MULTIPLIERS), tmp_path / "default", "megatron")
    check_scale_once(tmp_path / "default" / "release", name, 0.5)  # nothing was folded
    check_scale_once(tmp_path / "out" / "release", name, None)


def test_the_configuration_of_a_converted_run_with_a_scale(tmp_path):
    """Its weights do not contain the scale, so the error names the configuration that keeps it."""
    make_model(**NO_MULTIPLIERS).config.save_pretrained(tmp_path / "config")
    checkpoints.save(make_model(**NO_MULTIPLIERS), tmp_path / "out", "megatron")
    file = tmp_path / "config" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_multiplier": 0.5}))
    message = (
        r"attention_multiplier must be None .* got 0\.5.* trained with it, give its training configuration \(YAML\)"
    )
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path / "out", tmp_path / "config")
