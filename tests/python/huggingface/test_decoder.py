"""StickBreakingForCausalLM gives the results of the same model written out in float64."""

import pytest
import torch
from support import decoders
from support.messages import mentions
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import megatron_sb as sb
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM

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
    q, k, v = (
        (x @ weights[f"{prefix}.{name}_proj.weight"].T).view(1, len(x), -1, config.head_dim) for name in ("q", "k", "v")
    )
    options = {"attend_current": config.attend_current, "return_mass": True, "scale": config.attention_multiplier}
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
def test_logits_equal_the_oracle(variant):
    model, ids = make_model(**VARIANTS[variant]), tokens(2, 20)
    expected = torch.stack([expected_logits(model, row) for row in ids])
    assert expected.std() > 0.3
    torch.testing.assert_close(model(ids).logits.double(), expected, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["head vectors", "experts, tied"])
def test_padding_and_generation(variant):
    """Generation with a cache and left padding chooses the tokens of whole forwards without a cache."""
    model = make_model(**VARIANTS[variant])
    rows = [tokens(1, 9), tokens(1, 4)]
    ids, mask = decoders.padded(rows)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)[:, 9:]
    assert made.tolist() == [decoders.chosen(model, row, 6) for row in rows]


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_cache_under_both_names(name):
    """With either name of the cache, the second half of a row has the logits of the whole row."""
    model, ids, cache = make_model(), tokens(1, 12), DynamicCache()
    whole = model(ids).logits
    model(ids[:, :7], **{name: cache})
    assert cache.get_seq_length() == 7
    torch.testing.assert_close(model(ids[:, 7:], **{name: cache}).logits, whole[:, 7:], atol=1e-4, rtol=1e-4)


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


def test_saving_does_not_upload(tmp_path):
    """push_to_hub raises an error, because transformers would upload the folder before all files are written."""
    with pytest.raises(ValueError, match=mentions("push_to_hub True False model.push_to_hub")):
        make_model().save_pretrained(tmp_path / "new", push_to_hub=True)
    assert not (tmp_path / "new").exists()


def test_loss_and_gradients():
    """The loss is the cross-entropy of the next tokens. Gradient checkpointing does not change gradients."""
    model, ids = make_model(**VARIANTS["head vectors"]).train(), tokens(2, 16)
    made = model(ids, labels=ids)
    expected = torch.nn.functional.cross_entropy(made.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(made.loss, expected)
    made.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def test_hidden_states_and_kept_logits():
    model, ids = make_model(), tokens(1, 8)
    made = model(ids, output_hidden_states=True, logits_to_keep=2)
    assert len(made.hidden_states) == 3 and made.logits.shape == (1, 2, 97)
    torch.testing.assert_close(made.logits, model(ids).logits[:, -2:])
    as_tuple = model(ids, labels=ids, use_cache=False, return_dict=False)
    assert [part.shape for part in as_tuple] == [(), (1, 8, 97)]
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_attention_heads": 5}, "hidden_size 32 multiple num_attention_heads 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 num_attention_heads 4"),
        ({"mass_threshold": 1.0}, "mass_threshold 1.0"),
        ({"attention_multiplier": float("inf")}, "scale inf"),
        ({"num_experts": 4}, "num_experts_per_tok None num_experts 4"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5 num_experts 4"),
    ],
)
def test_invalid_configurations(fields, words):
    with pytest.raises(ValueError, match=mentions(words)):
        StickBreakingConfig(**SIZES | fields)


def test_invalid_calls():
    with pytest.raises(ValueError, match=mentions("attn_implementation 'eager' 'stickbreaking'")):
        AutoModelForCausalLM.from_config(StickBreakingConfig(**SIZES), attn_implementation="eager")
    with pytest.raises(ValueError, match=mentions("input_ids inputs_embeds one")):
        make_model()()
    with pytest.raises(ValueError, match=mentions("output_attentions True False")):
        make_model()(tokens(1, 4), output_attentions=True)
