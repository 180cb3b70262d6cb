"""StickBreakingForCausalLM gives the results of the same model written out in float64."""

import numpy as np
import pytest
import torch
from support import decoders
from support.decoders import BIASES, EUCLIDEAN, GATES
from support.messages import mentions
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, StaticCache
from transformers.cache_utils import QuantizedLayer

import megatron_sb as sb
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
from megatron_sb.huggingface.modeling import CACHE_FIELD
from megatron_sb.nn.gates import OPEN_GATE

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
VARIANTS = {
    "plain": {},
    "reach": {"reach": [0.5, 8.0]},
    "head vectors": {"remainder_bias": True, "head_norm": True},
    "remainder bias, own key": {"remainder_bias": True, "attend_current": True},
    "head norm, wide heads": {"head_norm": True, "head_norm_eps": 0.1, "head_dim": 16, "num_key_value_heads": 1},
    "multipliers": {
        "attention_multiplier": 0.1,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "experts, tied": {"num_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True},
    "biases": BIASES | {"num_key_value_heads": 1},
    "gates": GATES,
    "Euclidean": EUCLIDEAN,
    "gates, Euclidean": GATES | EUCLIDEAN | {"remainder_bias": True, "attend_current": True},
}


def make_model(**fields):
    return decoders.make_model(**SIZES | fields)


def tokens(*shape):
    return torch.randint(1, SIZES["vocab_size"], shape)


def rms_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def mlp(x, weights, prefix):
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    inner = x @ gate.T
    return (inner * torch.sigmoid(inner) * (x @ up.T)) @ down.T


def experts(x, weights, prefix, num_chosen):
    scores = x @ weights[f"{prefix}.router.weight"].T
    out = torch.zeros_like(x)
    for row, token in enumerate(x):
        best = scores[row].argsort(descending=True)[:num_chosen]
        shares = scores[row, best].exp() / scores[row, best].exp().sum()
        for share, number in zip(shares, best.tolist(), strict=True):
            out[row] += share * mlp(token, weights, f"{prefix}.experts.{number}")
    return out


def attention(x, weights, prefix, config):
    q, k, v = (x @ weights[f"{prefix}.{name}_proj.weight"].T for name in "qkv")
    if config.qkv_bias:
        q, k, v = (x + weights[f"{prefix}.{name}_proj.bias"] for name, x in (("q", q), ("k", k), ("v", v)))
    q, k, v = (x.view(1, len(x), -1, config.head_dim) for x in (q, k, v))
    options = {"attend_current": config.attend_current, "return_mass": True, "scale": config.attention_multiplier}
    options |= {"logits": config.logits, "reach": config.reach}
    if config.forget_gate:
        gates = torch.sigmoid(x @ weights[f"{prefix}.gate_proj.weight"].T + weights[f"{prefix}.gate_proj.bias"])
        options["forget_gate"] = gates[None]
    o, mass = sb.reference.stickbreaking_attention(q, k, v, **options)
    o, mass = o[0], mass[0].T  # (s, h, d), (s, h)
    if config.remainder_bias:
        o = o + mass[..., None] * weights[f"{prefix}.remainder_bias"].view(-1, config.head_dim)
    if config.head_norm:
        o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, keepdim=True, correction=0) + config.head_norm_eps).sqrt()
        o = o * weights[f"{prefix}.norm_weight"].view(-1, config.head_dim)
        o = o + weights[f"{prefix}.norm_bias"].view(-1, config.head_dim)
    return o.flatten(1) @ weights[f"{prefix}.o_proj.weight"].T


def expected_logits(model, row):
    """Compute the logits (s, vocab) of one row of tokens (s,) in float64."""
    config = model.config
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    x, step = weights["model.embed_tokens.weight"][row] * config.embedding_multiplier, config.residual_multiplier
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        inner = rms_norm(x, weights[f"{layer}.input_layernorm.weight"])
        x = x + step * attention(inner, weights, f"{layer}.self_attn", config)
        inner = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"])
        if config.num_experts:
            x = x + step * experts(inner, weights, f"{layer}.mlp", config.num_experts_per_tok)
        else:
            x = x + step * mlp(inner, weights, f"{layer}.mlp")
    return rms_norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T / config.logits_scaling


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_logits_equal_the_oracle(use_cache, variant):
    model, ids = make_model(**VARIANTS[variant]), tokens(2, 20)
    expected = torch.stack([expected_logits(model, row) for row in ids])
    assert expected.std() > 0.3
    found = model(ids, use_cache=use_cache).logits
    torch.testing.assert_close(found.double(), expected, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize(("field", "plain"), [("forget_gate", False), ("logits", "dot")])
def test_gates_and_euclidean_logits_matter(field, plain):
    """The oracle has other logits without gates, and with dot products. So it detects that a model ignores them."""
    model, row = make_model(**VARIANTS["gates, Euclidean"]), tokens(20)
    expected = expected_logits(model, row)
    setattr(model.config, field, plain)
    assert (expected_logits(model, row) - expected).abs().max() > 0.1


def test_the_default_scale_of_euclidean_logits():
    """It is 1. The weights are small, so that queries attend to keys."""
    model, ids = make_model(logits="euclidean"), tokens(1, 20)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 0.2
            layer.self_attn.k_proj.weight *= 0.2
    expected = expected_logits(model, ids[0])
    torch.testing.assert_close(model(ids).logits[0].double(), expected, atol=5e-4, rtol=1e-4)
    model.config.attention_multiplier = 8**-0.5  # the default scale of dot products
    assert (expected_logits(model, ids[0]) - expected).abs().max() > 0.1


def test_new_gates_are_open():
    model = StickBreakingForCausalLM(StickBreakingConfig(**SIZES | GATES | {"initializer_range": 0.02}))
    for layer in model.model.layers:
        assert torch.equal(layer.self_attn.gate_proj.bias, torch.full((2,), OPEN_GATE))
        assert 0.01 < layer.self_attn.gate_proj.weight.std() < 0.03


def test_new_biases_are_zero():
    model = StickBreakingForCausalLM(StickBreakingConfig(**SIZES | BIASES))
    for layer in model.model.layers:
        assert layer.self_attn.o_proj.bias is None
        assert not any(getattr(layer.self_attn, f"{name}_proj").bias.any() for name in "qkv")


@pytest.mark.parametrize(
    "variant", ["head vectors", "experts, tied", "biases", "gates", "Euclidean", "gates, Euclidean"]
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_and_generation(cache, variant):
    """Generation with a cache and left padding chooses the tokens of whole forwards without a cache."""
    model = make_model(**VARIANTS[variant])
    rows = [tokens(1, 9), tokens(1, 4)]
    ids, mask = decoders.padded(rows)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    expected = [decoders.chosen(model, row, 6) for row in rows]
    assert model.generate(ids, attention_mask=mask, **options)[:, 9:].tolist() == expected
    in_chunks = model.generate(rows[0], prefill_chunk_size=4, **options)[0, 9:].tolist()
    assert in_chunks == expected[0]


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_finds_the_padding(use_cache):
    """Without a mask, generate() takes tokens with pad_token_id on the left for padding."""
    model, rows = make_model(), [tokens(1, 9), tokens(1, 4)]
    ids, mask = decoders.padded(rows)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    found = model.generate(ids, **options)
    assert torch.equal(found, model.generate(ids, attention_mask=mask, **options))
    assert found[:, 9:].tolist() == [decoders.chosen(model, row, 6) for row in rows]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_second_turn_computes_only_new_tokens(cache, padding):
    """generate() of the whole conversation, with the cache of the first turn and without a mask."""
    model, prompts, new = make_model(), [tokens(1, 10), tokens(1, 4 if padding else 10)], tokens(2, 4)
    cache = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=48)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, CACHE_FIELD: cache}
    whole = torch.cat([model.generate(decoders.padded(prompts)[0], **options), new], 1)
    lengths = []
    model.model.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
    found = model.generate(whole, **options)[:, whole.shape[1] :].tolist()
    assert lengths == [5, 1, 1]  # the last token of the first turn is not in the cache
    rows = [row[10 - prompt.shape[1] :][None] for row, prompt in zip(whole, prompts, strict=True)]
    assert found == [decoders.chosen(model, row, 3) for row in rows]


def test_drafts_of_the_first_layers():
    """assistant_early_exit drafts tokens with some of the layers, and chooses those of greedy generation."""
    model, row = make_model(), tokens(1, 9)
    found = model.generate(row, assistant_early_exit=1, max_new_tokens=6, do_sample=False)
    assert found[0, 9:].tolist() == decoders.chosen(model, row, 6)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["gates", "Euclidean", "gates, Euclidean"])
def test_logits_with_a_cache(variant, cache, padding):
    """A prompt, a second prompt and single tokens have the logits that the oracle computes for the whole row."""
    model, prompt, steps = make_model(**VARIANTS[variant]), 20, (17, 1, 2, 1)  # 17 tokens are no decoding step
    rows = [tokens(1, prompt), tokens(1, prompt if padding is None else 13)]
    new = tokens(2, sum(steps))
    ids, mask = decoders.padded(rows, padding or "left")
    ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    cache = DynamicCache() if cache == "dynamic" else StaticCache(model.config, max_cache_len=48)
    found, end = [], 0
    for count in (prompt, *steps):
        begin, end = end, end + count
        kept = None if padding is None else mask[:, :end]
        with torch.no_grad():
            found.append(model(ids[:, begin:end], attention_mask=kept, past_key_values=cache).logits)
    for row, kept, logits in zip(ids, mask.bool(), torch.cat(found, 1), strict=True):
        torch.testing.assert_close(logits[kept].double(), expected_logits(model, row[kept]), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_batches_without_rows(cache, padding):
    """A rank can have none of the rows of a batch."""
    model, ids, end = make_model(**GATES), tokens(0, 12), 0
    cache = DynamicCache() if cache == "dynamic" else StaticCache(model.config, max_cache_len=16)
    for count in (8, 3, 1):
        begin, end = end, end + count
        mask = torch.ones(0, end, dtype=torch.long) if padding else None
        with torch.no_grad():
            logits = model(ids[:, begin:end], attention_mask=mask, past_key_values=cache).logits
        assert logits.shape == (0, count, 97)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_under_both_names(name):
    """With either name of the cache, the second half of a row has the logits of the whole row."""
    model, ids, cache = make_model(), tokens(1, 12), DynamicCache()
    whole = model(ids).logits
    model(ids[:, :7], **{name: cache})
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(model(ids[:, 7:], **{name: cache}).logits, whole[:, 7:], atol=1e-4, rtol=1e-4)


def test_two_caches():
    """They are one argument with two names."""
    model, ids, cache = make_model(), tokens(1, 4), DynamicCache()
    model(ids, cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match=mentions("cache past_key_values None")):
        model(ids, cache=cache, past_key_values=DynamicCache())
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded(variant, dtype, tmp_path):
    """A saved and loaded model has the same configuration and bitwise the same weights. The file is in safetensors."""
    model = make_model(**VARIANTS[variant]).to(dtype)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, StickBreakingForCausalLM)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == loaded.config.to_diff_dict()
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor) and loaded.state_dict()[name].dtype == dtype, name


def test_saved_numbers_of_numpy(tmp_path):
    """JSON has none: a configuration with one could not be saved."""
    sizes = {"vocab_size": np.int64(8), "hidden_size": np.int32(32), "num_attention_heads": np.int64(4)}
    config = StickBreakingConfig(**sizes, mass_threshold=np.float32(0.5), reach=(np.float32(0.5), np.int64(4)))
    config.save_pretrained(tmp_path)
    found = StickBreakingConfig.from_pretrained(tmp_path)
    assert (found.hidden_size, found.mass_threshold, list(found.reach)) == (32, 0.5, [0.5, 4])


def test_saving_does_not_upload(tmp_path):
    """push_to_hub raises an error, because transformers would upload the folder before all files are written."""
    with pytest.raises(ValueError, match=mentions("push_to_hub True False model.push_to_hub")):
        make_model().save_pretrained(tmp_path / "new", push_to_hub=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("variant", ["head vectors", "biases", "gates, Euclidean"])
def test_loss_and_gradients(variant):
    """The loss is the cross-entropy of the next tokens. Gradient checkpointing and a cache do not change gradients."""
    model, ids = make_model(**VARIANTS[variant]).train(), tokens(2, 16)
    made = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(made.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(made.loss, expected)
    made.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    for change in (model.eval, lambda: model.train().gradient_checkpointing_enable()):
        model.zero_grad()
        change()
        made = model(ids, labels=ids)
        assert (getattr(made, CACHE_FIELD) is None) == model.training
        made.loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_refuses_a_cache(reentrant):
    """The backward would append the keys twice. Without gradients, and without a cache, training mode is as before."""
    model, ids = make_model().train(), tokens(2, 12)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=24)):
        with torch.no_grad():
            model(ids[:, :6], **{CACHE_FIELD: cache})
        for part in (model, model.model):
            with pytest.raises(ValueError, match=mentions(f"cache None gradient checkpointing {type(cache).__name__}")):
                part(ids[:, 6:], **{CACHE_FIELD: cache})
        assert int(cache.get_seq_length()) == 6
    made = model(ids, labels=ids, use_cache=True)
    assert getattr(made, CACHE_FIELD) is None
    made.loss.backward()


def test_hidden_states_and_kept_logits():
    model, ids = make_model(), tokens(1, 8)
    made = model(ids, output_hidden_states=True, logits_to_keep=2)
    assert len(made.hidden_states) == 3 and made.logits.shape == (1, 2, 97)
    torch.testing.assert_close(made.logits, model(ids).logits[:, -2:])
    as_tuple = model(ids, labels=ids, use_cache=False, return_dict=False)
    assert [part.shape for part in as_tuple] == [(), (1, 8, 97)]
    (only_logits,) = make_model(return_dict=False, use_cache=False)(ids)
    torch.testing.assert_close(only_logits, as_tuple[1])
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size 32 multiple num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 num_attention_heads 4"),
        ({"mass_threshold": 1.0}, "mass_threshold 1.0"),
        ({"logits": "cosine"}, "logits 'dot' 'euclidean' 'cosine'"),
        ({"attention_multiplier": float("inf")}, "attention_multiplier inf"),
        ({"embedding_multiplier": float("nan")}, "embedding_multiplier finite nan"),
        ({"residual_multiplier": float("inf")}, "residual_multiplier finite inf"),
        ({"logits_scaling": 0.0}, "logits_scaling 0.0"),
        ({"logits_scaling": float("inf")}, "logits_scaling finite inf"),
        ({"logits_scaling": float("nan")}, "logits_scaling finite nan"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps 0 -1.0"),
        ({"head_norm": True, "head_norm_eps": 0.0}, "head_norm_eps 1e-30 0.0"),
        ({"head_dim": 7}, "head_dim multiple 8 256 7"),
        ({"head_dim": 264}, "head_dim 256 264"),
        ({"head_dim": 0}, "head_dim 1 0"),
        ({"hidden_size": 48}, "head_dim multiple 8 12"),
        ({"head_dim": 256, "logits": "euclidean"}, "head_dim 248 Euclidean 256"),
        ({"num_experts": 4}, "num_experts_per_tok None num_experts 4"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 num_experts 4"),
        ({"num_experts": 4, "num_experts_per_tok": 0}, "num_experts_per_tok 1 0"),
        ({"num_experts": 4, "num_experts_per_tok": True}, "num_experts_per_tok int True"),
        ({"num_experts": 4.0, "num_experts_per_tok": 2}, "num_experts int 4.0"),
        ({"num_experts": "4", "num_experts_per_tok": 2}, "num_experts int '4'"),
    ],
)
def test_invalid_configurations(fields, words):
    with pytest.raises(ValueError, match=mentions(words)):
        StickBreakingConfig(**SIZES | fields)
    for name in ("forget_gate", "qkv_bias"):
        with pytest.raises(TypeError, match=mentions(f"{name} True False int")):
            StickBreakingConfig(**SIZES | {name: 1})
    multipliers = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    for name in (*multipliers, "rms_norm_eps", "head_norm_eps"):
        with pytest.raises(TypeError, match=mentions(f"{name} number str")):
            StickBreakingConfig(**SIZES | {name: "12"})


def test_models_without_head_norm_ignore_its_epsilon():
    """Converted models have the epsilon of all norms of their checkpoint."""
    config = StickBreakingConfig(**SIZES | {"rms_norm_eps": 0.0, "head_norm_eps": 0.0})
    assert StickBreakingForCausalLM(config)(tokens(1, 4)).logits.isfinite().all()


def test_invalid_calls():
    with pytest.raises(ValueError, match=mentions("attn_implementation 'eager' 'stickbreaking'")):
        AutoModelForCausalLM.from_config(StickBreakingConfig(**SIZES), attn_implementation="eager")
    with pytest.raises(ValueError, match=mentions("input_ids inputs_embeds one")):
        make_model()()
    with pytest.raises(ValueError, match=mentions("output_attentions True False")):
        make_model()(tokens(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match=mentions("output_attentions True False")):
        make_model(output_attentions=True)(tokens(1, 4))
    with pytest.raises(ValueError, match=mentions("input_ids 2 dimensions (4,)")):
        make_model()(tokens(4))
    with pytest.raises(ValueError, match=mentions("inputs_embeds (batch, tokens, 32) (1, 4, 16)")):
        make_model()(inputs_embeds=torch.randn(1, 4, 16))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("shape", [(8,), (1, 4), (3, 8), (2, 1, 8)])
def test_positions_of_a_wrong_shape(shape, use_cache):
    """They were ignored, so that documents attended to each other."""
    with pytest.raises(ValueError, match=mentions(f"position_ids (2 or 1, 8) {shape}")):
        make_model()(tokens(2, 8), position_ids=torch.zeros(shape, dtype=torch.long), use_cache=use_cache)
    with pytest.raises(TypeError, match=mentions("position_ids torch.Tensor list")):
        make_model()(tokens(1, 2), position_ids=[[0, 0]])
    with pytest.raises(TypeError, match=mentions("cu_seq_lens_q torch.Tensor list")):
        make_model()(tokens(1, 2), cu_seq_lens_q=[0, 1, 2])


class RoundingLayer(QuantizedLayer):
    """Keys and values as they are: the installed packages quantize none."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


@pytest.mark.parametrize("variant", [GATES, EUCLIDEAN], ids=str)
def test_quantized_caches_need_plain_keys(variant):
    """The columns of variants would lose the digits that they split a number into."""
    ids, layers = tokens(1, 8), [RoundingLayer() for _ in range(2)]
    with pytest.raises(ValueError, match=mentions("cache quantized forget_gate Euclidean")):
        make_model(**variant)(ids, cache=Cache(layers=layers))
    model = make_model()
    torch.testing.assert_close(model(ids, cache=Cache(layers=layers)).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["given", "made"])
def test_caches_with_sliding_windows(kind):
    """Also where only the second layer drops keys: its weights would be those of other keys."""
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
    cache = DynamicCache(config=StickBreakingConfig(**SIZES | windows))
    model, arguments = (make_model(), {CACHE_FIELD: cache}) if kind == "given" else (make_model(**windows), {})
    with pytest.raises(ValueError, match=mentions("cache must keep all keys DynamicCache sliding windows")):
        model.generate(tokens(1, 6), max_new_tokens=2, **arguments)


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_a_wrong_shape(name):
    """The loss flattens labels: those of another shape gave a loss of other tokens."""
    model, ids = make_model(), tokens(2, 8)
    for shape in ((8, 2), (1, 16), (16,), (2, 7)):
        with pytest.raises(ValueError, match=mentions(f"{name} (2, 8) {shape}")):
            model(ids, **{name: torch.ones(shape, dtype=torch.long)})
    with pytest.raises(ValueError, match=mentions(f"{name} (2, 3) (2, 8)")):
        model(ids, logits_to_keep=3, **{name: ids})
    embedded = model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match=mentions(f"{name} (2, 8) (8, 2)")):
        model(inputs_embeds=embedded, **{name: ids.t()})
    losses = [model(**inputs, **{name: ids}).loss for inputs in ({"input_ids": ids}, {"inputs_embeds": embedded})]
    torch.testing.assert_close(*losses)
    assert model(ids, logits_to_keep=3, **{name: ids[:, -3:]}).loss.isfinite()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attention_mask", [[1, 1]], "attention_mask torch.Tensor list"),
        ("input_ids", [[1, 1]], "input_ids torch.Tensor list"),
        ("inputs_embeds", [[1.0, 1.0]], "inputs_embeds torch.Tensor list"),
        ("labels", [[1, 1]], "labels torch.Tensor list"),
        ("shift_labels", [[1, 1]], "shift_labels torch.Tensor list"),
        ("cache", ((torch.zeros(1), torch.zeros(1)),), "cache DynamicCache tuple"),
        ("past_key_values", sb.KVCache(1, 8, 2, 8), "cache DynamicCache KVCache"),
    ],
)
def test_arguments_of_a_wrong_type(name, value, words):
    inputs = {} if name in ("input_ids", "inputs_embeds") else {"input_ids": tokens(1, 2)}
    with pytest.raises(TypeError, match=mentions(words)):
        make_model()(**inputs, **{name: value})
