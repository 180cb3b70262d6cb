"""Every format preserves every bit. A naive implementation of each foreign layout computes the same logits.

test_multipliers.py has the models that conversion changes.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import decoders
from support.decoders import BIASES, EXPERTS, GATES, HEAD_VECTORS, TO_CONVERT
from transformers import AutoTokenizer, LlamaConfig

import megatron_sb as sb
from megatron_sb import checkpoints, cli
from megatron_sb.checkpoints import fla, llama
from megatron_sb.checkpoints.multipliers import NO_MULTIPLIERS
from megatron_sb.huggingface import byte_tokenizer
from megatron_sb.options import DEFAULT_MASS_THRESHOLD

MULTIPLIERS = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
VARIANTS = {
    "plain": {},
    "tied, one KV head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "head vectors": HEAD_VECTORS,
    "remainder bias, own key, wide heads": {"remainder_bias": True, "attend_current": True, "head_dim": 16},
    "own key": {"attend_current": True},
    "multipliers": MULTIPLIERS,
    "experts, head norm": EXPERTS | {"head_norm": True},
    "biases": BIASES,
    "biases, head vectors, one KV head": BIASES | HEAD_VECTORS | {"num_key_value_heads": 1},
    "gates": GATES,
    "Euclidean logits, gates, head vectors": {"logits": "euclidean"} | GATES | HEAD_VECTORS,
}
WITHOUT_LIMITS = "Formats that store this value: huggingface, megatron."
WITH_VARIANTS = {"gates", "Euclidean logits, gates, head vectors"}
SUPPORTED = {
    "huggingface": set(VARIANTS),
    "megatron": set(VARIANTS) - {"multipliers"},
    "dolomite": set(VARIANTS) - {"remainder bias, own key, wide heads", "own key"} - WITH_VARIANTS,
    "fla": {"plain", "tied, one KV head", "own key", "biases"},
}
# The other two formats have no fields for multipliers, so these are folded into weights.
WITH_MULTIPLIERS = ("huggingface", "dolomite")
CASES = [
    (to, variant)
    for to in checkpoints.FORMATS
    for variant in VARIANTS
    if variant != "multipliers" or to in WITH_MULTIPLIERS
]


def make_model(dtype=torch.float32, **fields):
    return decoders.make_model(dtype, **TO_CONVERT | fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("to", "variant"), CASES)
def test_there_and_back(to, variant, dtype, tmp_path):
    """Weights keep every bit, the configuration every field. An unsupported option is an error and leaves no file."""
    model = make_model(dtype, max_position_embeddings=512, **VARIANTS[variant])
    if variant not in SUPPORTED[to]:
        with pytest.raises(ValueError, match=rf"must be .* in the {to} format, got "):
            checkpoints.save(model, tmp_path / "out", to)
        assert not list(tmp_path.iterdir())
        return
    checkpoints.save(model, tmp_path / "out", to)
    assert checkpoints.format_of(tmp_path / "out") == to
    model.config.save_pretrained(tmp_path / "config")
    back = checkpoints.load(tmp_path / "out", tmp_path / "config" if to == "megatron" else None)
    before, after = model.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype, name
    fields, found = model.config.to_dict(), back.config.to_dict()
    ignored = {"_name_or_path", "dtype", "transformers_version", "architectures", "use_cache"}
    assert {name: found[name] for name in fields.keys() - ignored} == {
        name: fields[name] for name in fields.keys() - ignored
    }
    ids = torch.randint(61, (1, 12))
    assert torch.equal(back(ids).logits, model(ids).logits)


@pytest.mark.parametrize("to", WITH_MULTIPLIERS)
def test_multipliers_of_zero(to, tmp_path):
    """They are kept. Only a missing one is 1."""
    checkpoints.save(make_model(embedding_multiplier=0.0, residual_multiplier=0.0), tmp_path / "out", to)
    config = checkpoints.load(tmp_path / "out").config
    assert (config.embedding_multiplier, config.residual_multiplier, config.logits_scaling) == (0, 0, 1)


@pytest.mark.parametrize("to", ["dolomite", "fla"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (GATES, "forget_gate must be False in the {} format, got True. " + WITHOUT_LIMITS),
        ({"logits": "euclidean"}, "logits must be 'dot' in the {} format, got 'euclidean'. " + WITHOUT_LIMITS),
    ],
)
def test_formats_without_variants(to, fields, message, tmp_path, capsys):
    """The command names the option in one line."""
    make_model(**fields).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", to]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(to) in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("attend_current", {"attend_current": True}),
        ("head_dim", {"head_dim": 16}),
        ("head_norm", {"head_norm": True}),
        ("head_norm_eps", {"head_norm": True, "head_norm_eps": 0.1}),
        ("num_experts", EXPERTS),
        ("reach", {"reach": [0.5, 3.0]}),
        ("remainder_bias", {"remainder_bias": True}),
    ],
)
def test_messages_name_the_formats_with_an_option(field, fields, tmp_path):
    """Exactly the formats in the message can be written."""
    model, messages = make_model(**fields), {}
    for to in checkpoints.FORMATS:
        try:
            checkpoints.save(model, tmp_path / to, to)
        except ValueError as error:
            messages[to] = str(error)
    named = {text.rpartition("store this value: ")[2] for text in messages.values() if text.startswith(f"{field} must")}
    assert named == {", ".join(to for to in checkpoints.FORMATS if to not in messages) + "."}


@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_the_mass_threshold(to, tmp_path):
    """Dolomite and flash-linear-attention do not store it: a model read from there has the default."""
    model = make_model(mass_threshold=0.25)
    checkpoints.save(model, tmp_path / "out", to)
    model.config.save_pretrained(tmp_path / "config")
    back = checkpoints.load(tmp_path / "out", tmp_path / "config" if to == "megatron" else None)
    kept = to in ("huggingface", "megatron")
    assert back.config.mass_threshold == (0.25 if kept else DEFAULT_MASS_THRESHOLD)


@pytest.mark.parametrize(
    ("to", "supported"), [("huggingface", None), ("megatron", 1e-6), ("dolomite", 1e-5)], ids=lambda value: str(value)
)
def test_the_epsilon_of_head_norm(to, supported, tmp_path):
    """Megatron uses the epsilon of the layers' norms, Dolomite 1e-5. Another epsilon is an error, both ways."""
    for eps in (1e-5, 1e-6):
        out = tmp_path / str(eps)
        model = make_model(head_norm=True, head_norm_eps=eps, rms_norm_eps=1e-6)
        model.config.save_pretrained(out / "config")
        if supported in (None, eps):
            checkpoints.save(model, out / "out", to)
            back = checkpoints.load(out / "out", out / "config" if to == "megatron" else None)
            assert (back.config.head_norm_eps, back.config.rms_norm_eps) == (eps, 1e-6)
        else:
            with pytest.raises(ValueError, match=rf"head_norm_eps must be {supported} .* got {eps}"):
                checkpoints.save(model, out / "out", to)
    if to == "megatron":
        with pytest.raises(ValueError, match=r"head_norm_eps must be 1e-06 .* got 1e-05"):
            checkpoints.load(out / "out", tmp_path / "1e-05" / "config")


def rms_norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def swiglu(x, wide, back):
    """The rows of c_fc are the up projection, then the gate."""
    both = wide @ x
    up, gate = both[: len(both) // 2], both[len(both) // 2 :]
    return back @ (up * gate * torch.sigmoid(gate))


def dolomite_attention(x, weights, prefix, config, kv_head_layout):
    """Read c_attn row by row and repeat the KV heads, as lm-engine's modules of 2025 do. x: (s, hidden)."""
    heads, kv_heads = config["n_head"], config["num_key_value_heads"]
    width = config["n_embd"] // heads
    fused = weights[f"{prefix}.c_attn.weight"]
    if (bias := weights.get(f"{prefix}.c_attn.bias")) is not None:  # as a column, which multiplies a 1
        fused, x = torch.cat([fused, bias[:, None]], 1), torch.cat([x, torch.ones_like(x[:, :1])], 1)
    group = (heads // kv_heads + 2) * width  # rows of a KV head: its query heads, its keys, its values
    q, k, v = [], [], []
    for kv_head in range(kv_heads):
        rows = fused[kv_head * group : (kv_head + 1) * group]
        q += list(rows[: -2 * width].split(width))
        k.append(rows[-2 * width : -width])
        v.append(rows[-width:])
    out, times = [], heads // kv_heads
    repeat = {"tiled": lambda w: w.repeat(times, 1, 1), "grouped": lambda w: w.repeat_interleave(times, 0)}
    k, v = (repeat[kv_head_layout](torch.stack(w)) for w in (k, v))
    for head in range(heads):
        parts = [(x @ w.T)[None, :, None] for w in (q[head], k[head], v[head])]
        options = {"scale": config.get("attention_multiplier"), "return_mass": True}
        if "reach" in config:
            options["reach"] = (torch.linspace(*config["reach"], heads)[head].item(),) * 2
        o, mass = sb.reference.stickbreaking_attention(*parts, **options)
        o = o[0, :, 0]
        if (bias := weights.get(f"{prefix}.head_bias")) is not None:
            o = o + mass[0, 0, :, None] * bias[head]
        out.append(o)
    out = torch.cat(out, 1)
    if (weight := weights.get(f"{prefix}.norm.weight")) is not None:
        out = torch.nn.functional.group_norm(out, heads, weight, weights[f"{prefix}.norm.bias"], 1e-5)
    return out @ weights[f"{prefix}.c_proj.weight"].T


def dolomite_mlp(x, weights, prefix, config):
    wide, back = weights[f"{prefix}.c_fc.weight"], weights[f"{prefix}.c_proj.weight"]
    if wide.dim() == 2:
        return torch.stack([swiglu(token, wide, back) for token in x])
    out = []
    for token in x:
        best = (weights[f"{prefix}.gate.weight"] @ token).topk(config["num_experts_per_tok"])
        shares = best.values.softmax(0)
        out.append(sum(share * swiglu(token, wide[i], back[i]) for share, i in zip(shares, best.indices, strict=True)))
    return torch.stack(out)


def dolomite_logits(ids, weights, config, attn, mlp, kv_head_layout):
    """Compute the logits of a whole Dolomite model in float64."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    eps, step = config["layer_norm_epsilon"], config.get("m_residual") or 1
    x = weights["transformer.wte.weight"][ids] * (config.get("m_emb") or 1)
    for number in range(config["n_layer"]):
        layer = f"transformer.h.{number}"
        inner = rms_norm(x, weights[f"{layer}.ln_1.weight"], eps)
        x = x + step * dolomite_attention(inner, weights, f"{layer}.{attn}", config, kv_head_layout)
        inner = rms_norm(x, weights[f"{layer}.ln_2.weight"], eps)
        x = x + step * dolomite_mlp(inner, weights, f"{layer}.{mlp}", config)
    x = rms_norm(x, weights["transformer.ln_f.weight"], eps)
    head = weights.get("lm_head.weight", weights["transformer.wte.weight"])
    return x @ head.T / (config.get("m_width") or 1)


@pytest.mark.parametrize("variant", sorted(SUPPORTED["dolomite"]))
def test_the_flat_dolomite_format(variant, tmp_path):
    """The written weights give the model's logits under the rules of that format."""
    model = make_model(**VARIANTS[variant])
    checkpoints.save(model, tmp_path / "out", "dolomite")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ids, mlp = torch.randint(61, (12,)), "moe" if "num_experts" in config else "mlp"
    expected = dolomite_logits(ids, load_file(tmp_path / "out" / "model.safetensors"), config, "attn", mlp, "tiled")
    torch.testing.assert_close(model(ids[None]).logits[0].double(), expected, atol=5e-4, rtol=1e-4)


def as_pairs(rows):
    """Return rows of the up projection, then the gate, as pairs (gate, up)."""
    up, gate = rows.chunk(2, dim=-2)
    return torch.stack([gate, up], dim=-2).flatten(-3, -2)


@pytest.mark.parametrize("layout", ["grouped", "tiled", "patched"])
@pytest.mark.parametrize("has_experts", [False, True])
def test_the_dolomite_format_of_blocks(has_experts, layout, tmp_path):
    """gpt_base has different names, grouped or tiled KV heads, and experts in mlp_block.

    examples/lm_engine adds fields. There the rows of c_fc are pairs (gate, up), and KV heads are grouped.
    """
    flat = {"n_embd": 32, "n_head": 4, "num_key_value_heads": 2, "n_layer": 2, "layer_norm_epsilon": 1e-5}
    mixer = {"sequence_mixer_type": "stickbreaking_attention", "num_attention_heads": 4, "num_key_value_heads": 2}
    mlp = {"mlp_type": "MoE" if has_experts else "MLP", "intermediate_size": 24, "activation_function": "swiglu"}
    mlp |= EXPERTS if has_experts else {}
    config = {
        "model_type": "gpt_base",
        "vocab_size": 61,
        "hidden_size": 32,
        "num_layers": 2,
        "normalization_function": "rmsnorm",
        "position_embedding_type": "nope",
        "m_residual": 0.5,
        "m_width": 4,
        "sequence_mixer_blocks": [mixer | {"add_bias": False, "attention_multiplier": 0.2}] * 2,
        "mlp_blocks": [mlp | {"add_bias": False}] * 2,
    }
    shapes = {
        "ln_1.weight": (32,),
        "ln_2.weight": (32,),
        "sequence_mixer.c_attn.weight": (64, 32),
        "sequence_mixer.c_proj.weight": (32, 32),
        "sequence_mixer.head_bias": (4, 8),
        "sequence_mixer.norm.weight": (32,),
        "sequence_mixer.norm.bias": (32,),
        "mlp_block.c_fc.weight": (3, 48, 32) if has_experts else (48, 32),
        "mlp_block.c_proj.weight": (3, 32, 24) if has_experts else (32, 24),
    } | ({"mlp_block.gate.weight": (3, 32)} if has_experts else {})
    weights = {
        f"transformer.h.{n}.{name}": 0.3 * torch.randn(shape) for n in range(2) for name, shape in shapes.items()
    }
    weights |= {"transformer.wte.weight": torch.randn(61, 32), "transformer.ln_f.weight": torch.rand(32) + 0.5}
    described, stored, kv_heads = config | flat | {"attention_multiplier": 0.2} | EXPERTS, weights, layout
    if layout == "patched":
        options = {"reach": [0.5, 6.0], "head_dim": None}
        described |= options | {"attention_multiplier": 1 / 8}
        for block in config["sequence_mixer_blocks"]:
            block |= options | {"attention_multiplier": None, "attention_multiplier_method": "1 / head_dim"}
        stored = {name: as_pairs(x) if name.endswith("c_fc.weight") else x for name, x in weights.items()}
        kv_heads = None
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "model.safetensors")
    model, ids = checkpoints.load(tmp_path, kv_heads=kv_heads), torch.randint(61, (12,))
    expected = dolomite_logits(ids, weights, described, "sequence_mixer", "mlp_block", kv_heads or "grouped")
    torch.testing.assert_close(model(ids[None]).logits[0].double(), expected, atol=5e-4, rtol=1e-4)


PUBLISHED = {  # the relevant fields of shawntan/stickbreaking-3b's config.json, with smaller sizes
    "activation_function": "swiglu",
    "add_bias": False,
    "add_qkv_bias": False,
    "attention_head_type": "mha",
    "attention_multiplier": 0.015625,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.1,
    "layer_norm_epsilon": 1e-05,
    "m_emb": 12,
    "m_residual": 0.22,
    "m_width": 9,
    "model_type": "stickbreaking",
    "n_embd": 32,
    "n_head": 4,
    "n_inner": 24,
    "n_layer": 1,
    "n_positions": 4096,
    "normalization_function": "rmsnorm",
    "num_key_value_heads": 4,
    "pad_token_id": 50256,
    "position_embedding_type": "nope",
    "sb_remainder": False,
    "scale_attn_weights": True,
    "vocab_size": 61,
}


def write_published(folder, **changes):
    config = PUBLISHED | changes
    rows = (config["n_head"] + 2 * config["num_key_value_heads"]) * 32 // config["n_head"]
    weights = {
        "transformer.wte.weight": torch.randn(61, 32),
        "transformer.ln_f.weight": torch.rand(32),
        "transformer.h.0.ln_1.weight": torch.rand(32),
        "transformer.h.0.ln_2.weight": torch.rand(32),
        "transformer.h.0.attn.c_attn.weight": torch.randn(rows, 32),
        "transformer.h.0.attn.c_proj.weight": torch.randn(32, 32),
        "transformer.h.0.mlp.c_fc.weight": torch.randn(48, 32),
        "transformer.h.0.mlp.c_proj.weight": torch.randn(32, 24),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return weights


@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_the_published_configuration(to, tmp_path):
    """Embeddings are tied by default; the scale and muP's multipliers are read. Every format has the same logits."""
    source, out = tmp_path / "published", tmp_path / "out"
    weights, ids = write_published(source), torch.randint(61, (12,))
    model = checkpoints.load(source)
    assert model.config.tie_word_embeddings and model.config.attention_multiplier == 1 / 64
    assert cli.main(["convert", str(source), str(out), "--to", to]) == 0
    for name, none in NO_MULTIPLIERS.items():
        setattr(model.config, name, none)
    model.config.save_pretrained(tmp_path / "config")
    back = checkpoints.load(out, tmp_path / "config" if to == "megatron" else None)
    expected = dolomite_logits(ids, weights, PUBLISHED, "attn", "mlp", "tiled")
    torch.testing.assert_close(back(ids[None]).logits[0].double(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kv_heads", ["grouped", "tiled"])
def test_the_choice_of_kv_heads(kv_heads, tmp_path):
    """Each choice gives the logits of the code that repeats KV heads that way. They differ from each other."""
    folder, changes = tmp_path / "source", {"attention_head_type": "gqa", "num_key_value_heads": 2}
    weights, ids = write_published(folder, **changes), torch.randint(61, (12,))
    assert cli.main(["convert", str(folder), str(tmp_path / "out"), "--to", "dolomite", "--kv-heads", kv_heads]) == 0
    # The written folder records its KV heads.
    models = [checkpoints.load(folder, kv_heads=kv_heads), checkpoints.load(tmp_path / "out")]
    expected = dolomite_logits(ids, weights, PUBLISHED | changes, "attn", "mlp", kv_heads)
    for model in models:
        torch.testing.assert_close(model(ids[None]).logits[0].double(), expected, atol=1e-3, rtol=1e-3)
    other = {"grouped": "tiled", "tiled": "grouped"}[kv_heads]
    assert (checkpoints.load(folder, kv_heads=other)(ids[None]).logits[0] - expected).abs().max() > 0.1
    with pytest.raises(ValueError, match=r"kv_heads must be 'tiled', which config.json records, got 'grouped'"):
        checkpoints.load(tmp_path / "out", kv_heads="grouped")


def test_the_choice_of_kv_heads_is_required(tmp_path, capsys):
    """Only where it makes a difference: with one KV head, or as many as query heads, there is one order."""
    write_published(tmp_path / "source", num_key_value_heads=2)
    assert cli.main(["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--to", "huggingface"]) == 2
    message = "kv_heads must be 'grouped' or 'tiled' (--kv-heads) for 4 query heads and 2 KV heads, got None"
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="kv_heads must be 'grouped' or 'tiled', got 'interleaved'"):
        checkpoints.load(tmp_path / "source", kv_heads="interleaved")
    for kv_heads in (1, 4):
        write_published(tmp_path / str(kv_heads), num_key_value_heads=kv_heads)
        weights = [checkpoints.load(tmp_path / str(kv_heads), kv_heads=choice) for choice in (None, "grouped", "tiled")]
        first, *others = (model.state_dict() for model in weights)
        assert all(torch.equal(x, other[name]) for other in others for name, x in first.items())
    make_model().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="kv_heads must be None for a huggingface folder, got 'tiled'"):
        checkpoints.load(tmp_path / "model", kv_heads="tiled")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sb_remainder": True}, "sb_remainder must be False .* got True"),
        ({"activation_function": "gelu"}, "activation_function must be 'swiglu', got 'gelu'"),
        ({"normalization_function": "layernorm"}, "normalization_function must be .* got 'layernorm'"),
        ({"add_bias": True}, "add_bias must be False, got True"),
        ({"add_qkv_bias": True}, r"Missing weights in the checkpoint .*: transformer\.h\.0\.attn\.c_attn\.bias"),
        ({"add_qkv_bias": "yes"}, "config.json: .*qkv_bias"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be .* got 'alibi'"),
        ({"model_type": "gpt2"}, "model_type must be one of .* got 'gpt2'"),
        ({"kv_head_layout": "swapped"}, "kv_head_layout must be 'grouped' or 'tiled', got 'swapped'"),
        ({"attention_head_type": "gqa", "num_key_value_heads": 0}, "json: num_key_value_heads is required"),
        ({"m_emb": "12"}, "json: embedding_multiplier must be a finite number, got str"),
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
        ({"forget_gate": True}, "forget_gate must be False, got True"),
        ({"use_aux_free_moe": True}, "use_aux_free_moe must be False, got True"),
        ({"shared_n_inner": 64}, "shared_n_inner must be None, got 64"),
        ({"n_inner": 32}, "Weights of the wrong shape in the checkpoint .*mlp"),
    ],
)
def test_unsupported_folders(changes, message, tmp_path):
    write_published(tmp_path / "published", **changes)
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path / "published")


MIXER = {"sequence_mixer_type": "stickbreaking_attention", "num_key_value_heads": 4, "add_bias": False}
MLP = {"mlp_type": "MoE", "intermediate_size": 24, "activation_function": "swiglu", "add_bias": False} | EXPERTS
OF_BLOCKS = {
    "model_type": "gpt_base",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_layers": 1,
    "normalization_function": "rmsnorm",
    "position_embedding_type": "nope",
    "sequence_mixer_blocks": [MIXER],
    "mlp_blocks": [MLP],
}
OF_FLA = {"model_type": "stickbreaking_attn", "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1}


def test_the_defaults_of_llama(tmp_path):
    """Those of transformers, whose configurations leave fields with default values out."""
    save_file({"model.embed_tokens.weight": torch.zeros(61, 32)}, tmp_path / "model.safetensors")
    sizes = dict(zip(llama.SIZES, (61, 32, 64, 1, 4), strict=True))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    config, _ = llama.load(tmp_path)
    theirs = LlamaConfig(**sizes)
    for name in ("rms_norm_eps", "initializer_range", "tie_word_embeddings", "num_key_value_heads", "head_dim"):
        assert getattr(config, name) == getattr(theirs, name), name


def test_the_defaults_of_flash_linear_attention(tmp_path):
    """Its configurations leave fields out. The MLP is 4 * 2 / 3 times as wide as the model, rounded up to 256."""
    save_file({"model.embeddings.weight": torch.zeros(61, 32)}, tmp_path / "model.safetensors")
    for fields, wanted in (({"hidden_size": 2048}, 5632), ({"hidden_size": 2048, "hidden_ratio": 3}, 4096)):
        (tmp_path / "config.json").write_text(json.dumps(OF_FLA | fields))
        config, weights = fla.load(tmp_path)
        assert config.intermediate_size == wanted and list(weights) == ["model.embed_tokens.weight"]
        assert (config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps) == (32, 32, 1e-6)
        assert not config.attend_current and not config.tie_word_embeddings and not config.qkv_bias


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (OF_BLOCKS, "normalization_function", "layernorm"),
        (OF_BLOCKS, "position_embedding_type", "alibi"),
        (OF_BLOCKS, "sequence_mixer_blocks.sequence_mixer_type", "softmax_attention"),
        (OF_BLOCKS, "sequence_mixer_blocks.add_bias", True),
        (OF_BLOCKS, "sequence_mixer_blocks.attention_multiplier_method", "1 / head_dim ** 2"),
        *((OF_BLOCKS, name, value) for name in ("sequence_mixer_blocks", "mlp_blocks") for value in (0, {}, [], [1])),
        *((config, "hidden_size", value) for config in (OF_BLOCKS, OF_FLA) for value in ("x", 0, [1])),
        (OF_BLOCKS, "mlp_blocks.mlp_type", "other"),
        (OF_BLOCKS, "mlp_blocks.activation_function", "geglu"),
        (OF_BLOCKS, "mlp_blocks.add_bias", True),
        (OF_BLOCKS, "mlp_blocks.shared_intermediate_size", 64),
        (OF_BLOCKS, "mlp_blocks.shared_expert_gating", True),
        (OF_BLOCKS, "mlp_blocks.normalized_topk", False),
        (OF_FLA, "qk_norm", True),
        (OF_FLA, "hidden_act", "gelu"),
        # Without these fields, the models have other defaults.
        *((OF_BLOCKS, name, None) for name in ("normalization_function", "position_embedding_type")),
        *((OF_BLOCKS, f"mlp_blocks.{name}", None) for name in ("activation_function", "add_bias")),
        *((PUBLISHED, name, None) for name in ("activation_function", "normalization_function", "add_bias")),
    ],
)
def test_options_that_the_model_lacks(config, name, value, tmp_path):
    """They would give other logits. None removes a field. The error comes before the weights are read."""
    block, _, field = name.rpartition(".")
    changed = json.loads(json.dumps(config))
    fields = changed[block][0] if block else changed
    fields[field] = value
    if value is None:
        del fields[field]
    (tmp_path / "config.json").write_text(json.dumps(changed))
    (tmp_path / "model.safetensors").touch()
    got = ".*" if value is None else re.escape(repr(value))
    with pytest.raises(ValueError, match=rf"config\.json: {field} must be .*, got {got}\."):
        checkpoints.load(tmp_path)


@pytest.mark.parametrize("has_biases", [False, True])
def test_the_names_of_flash_linear_attention(has_biases, tmp_path):
    """Weights have its models' names. test_flash_linear_attention.py runs its own code on them."""
    checkpoints.save(make_model(qkv_bias=has_biases), tmp_path / "out", "fla")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["qkv_bias"] == has_biases
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    parts = (
        "attn.q_proj",
        "attn.k_proj",
        "attn.v_proj",
        "attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    expected = {f"model.layers.{n}.{part}.weight" for n in range(2) for part in (*parts, "attn_norm", "mlp_norm")}
    expected |= {f"model.layers.{n}.{part}.bias" for n in range(2) for part in parts[:3] if has_biases}
    assert names == expected | {"model.embeddings.weight", "model.norm.weight", "lm_head.weight"}


def test_a_context_that_flash_linear_attention_leaves_open(tmp_path):
    checkpoints.save(make_model(), tmp_path / "out", "fla")
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": None}))
    assert checkpoints.load(tmp_path / "out").config.max_position_embeddings == 65536


def test_the_command(tmp_path, capsys):
    make_model().save_pretrained(tmp_path / "model")
    assert cli.main(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "dolomite"]) == 0
    assert "huggingface" in capsys.readouterr().out
    assert cli.main(["convert", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "huggingface"]) == 0
    assert torch.equal(checkpoints.load(tmp_path / "back").lm_head.weight, make_model().lm_head.weight)
    assert cli.main(["convert", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "huggingface"]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path / "nothing"), str(tmp_path / "more"), "--to", "fla"]) == 2
    assert f"source must be the folder of a checkpoint or a run, got '{tmp_path}/nothing'" in capsys.readouterr().err
    assert cli.main(["convert", str(tmp_path), str(tmp_path / "more"), "--to", "fla"]) == 2
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize("to", checkpoints.FORMATS)
def test_those_who_can_read_other_new_files_can_read_the_weights(to, tmp_path):
    """safetensors writes files that only their owner can read."""
    checkpoints.save(make_model(), tmp_path / "out", to)
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_a_link_to_nothing_as_out(tmp_path):
    """A folder cannot replace it. This is an error before a model is read."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"out must be a new folder, got .*link', which exists"):
        checkpoints.check_target(tmp_path / "link", "fla")
    with pytest.raises(ValueError, match=r"out must be a new folder, got ''\."):
        checkpoints.check_target("", "fla")


def test_the_tokenizer_stays(tmp_path, capsys):
    """Its files come along, also through a format that does not use them."""
    make_model().save_pretrained(tmp_path / "model")
    tokenizer, templates = byte_tokenizer(), {"default": "{{messages}}", "tools": "{{tools}}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer").mkdir()  # not a file of a tokenizer
    for source, out, to in (("model", "theirs", "megatron"), ("theirs", "back", "huggingface")):
        config = ["--config", str(tmp_path / "model")] if to == "huggingface" else []
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / out), "--to", to, *config]) == 0
    loaded = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded("é")["input_ids"] == [0xC3, 0xA9] and loaded.chat_template == templates
    assert not (tmp_path / "back" / "tokenizer").exists()
