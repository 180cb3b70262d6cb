"""attn_implementation="stickbreaking" in decoders of transformers, compared with the oracle in the same models."""

import dataclasses
import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from support import decoders
from support.decoders import chosen, padded
from support.messages import mentions
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    GPT2Config,
    GPTNeoXJapaneseConfig,
    LlamaConfig,
    StaticCache,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import megatron_sb as sb
from megatron_sb.huggingface import StickBreakingConfig, attention, without_positions
from megatron_sb.huggingface.packing import document_mask
from megatron_sb.ops.kvcache import attend_to_filled

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DECODERS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.1},
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 2, "sliding_window": None},
    "gemma": {"head_dim": 16},
}


def make_config(name="llama", **fields):
    return CONFIG_MAPPING[name](**SIZES | DECODERS.get(name, {}) | fields)


def make_model(config):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking").eval()


def without_rotation(name="llama", **fields):
    return without_positions(make_config(name, **fields))


def oracle_logits(config, ids):
    """Return the logits of a model whose attention calls the oracle, which supports batches without padding."""

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return sb.reference.stickbreaking_attention(q, k, v, scale=scaling).to(q.dtype), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "stickbreaking", attend)
        return logits(make_model(config), ids)


def tokens(*shape):
    return torch.randint(1, VOCAB, shape)


def logits(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_equal_the_oracle(name):
    """The models differ in scale, grouped heads and experts."""
    config, ids = without_rotation(name), tokens(2, 24)
    ours = make_model(config)
    assert ours.config._attn_implementation == "stickbreaking"
    torch.testing.assert_close(logits(ours, ids), oracle_logits(config, ids), atol=2e-5, rtol=1e-4)


def test_order_matters_without_positions():
    model, ids = make_model(without_rotation()), tokens(1, 16)
    swapped = ids[:, [1, 0, *range(2, 16)]]
    assert (logits(model, ids)[:, -1] - logits(model, swapped)[:, -1]).abs().max() > 1e-3


def test_layers_without_rotation_are_accepted():
    """SmolLM3 has a flag for rotation in each layer."""
    config = make_config("smollm3", no_rope_layers=[0, 0])
    ids = tokens(1, 12)
    assert config.rope_parameters["rope_type"] == "default"
    torch.testing.assert_close(logits(make_model(config), ids), oracle_logits(config, ids), atol=2e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=mentions("rope_type 'default'")):
        logits(make_model(make_config("smollm3", no_rope_layers=[0, 1])), ids)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    """Rows of lengths 12, 7 and 1 have the same logits and gradients in one batch as alone."""
    model, lengths = make_model(without_rotation()), (12, 7, 1)
    rows = [tokens(1, length) for length in lengths]
    ids, mask = padded(rows, side)
    kept = mask.bool()
    together = model(ids, attention_mask=mask).logits
    weight = torch.randn(sum(lengths), VOCAB)
    (together[kept] * weight).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = torch.cat([model(row).logits[0] for row in rows])
    torch.testing.assert_close(together[kept], alone, atol=1e-5, rtol=1e-4)
    (alone * weight).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-4, rtol=1e-3, msg=name)


def make_stick_breaking_model(**fields):
    return decoders.make_model(**SIZES | fields)


def make_gated_model():
    return make_stick_breaking_model(**decoders.GATES, **decoders.EUCLIDEAN)


@pytest.mark.parametrize(
    "make",
    [lambda: make_model(without_rotation()), make_stick_breaking_model, make_gated_model],
    ids=["llama", "stickbreaking", "gates, Euclidean"],
)
@pytest.mark.parametrize("cache", [None, "dynamic", "static"])
@pytest.mark.parametrize("given_by", ["positions", "positions and a mask", "bounds"])
def test_packed_documents(make, cache, given_by):
    """Documents are given by positions that restart at 0, or by cu_seq_lens_q. An empty cache changes nothing."""
    model, rows = make(), [tokens(1, 5), tokens(1, 9), tokens(1, 1)]
    lengths = [row.shape[1] for row in rows]
    documents = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    if given_by == "bounds":
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        documents = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    if given_by == "positions and a mask":
        documents["attention_mask"] = torch.ones(1, sum(lengths), dtype=torch.long)
    alone = torch.cat([logits(model, row) for row in rows], 1)
    for _ in range(2):  # the second forward uses the mask that the first one stored
        caches = {"use_cache": cache is not None}
        if cache == "static":  # with slots that stay empty
            caches["past_key_values"] = StaticCache(model.config, max_cache_len=sum(lengths) + 3)
        packed = logits(model, torch.cat(rows, 1), **caches, **documents)
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)
    if given_by == "positions":
        documents["position_ids"].data.copy_(torch.arange(sum(lengths)))  # torch does not count this write
        whole = logits(model, torch.cat(rows, 1))
        torch.testing.assert_close(logits(model, torch.cat(rows, 1), **documents), whole, atol=1e-5, rtol=1e-4)
        assert (whole - alone).abs().max() > 1e-3


def test_a_cache_that_drops_its_oldest_keys_is_an_error():
    """Each key takes a part of the stick, so that the others would get other weights."""
    assert attention.attention_mask(1, 1, 4, q_offset=3) is None
    with pytest.raises(ValueError, match=mentions("kv_offset oldest 0 3")):
        attention.attention_mask(1, 1, 4, q_offset=6, kv_offset=3)


def test_a_document_starts_where_positions_do_not_increase_by_one():
    """Also where they jump ahead, as in transformers, and where the first one is not 0."""
    positions = torch.tensor([[3, 4, 9, 10, 10, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    mask = document_mask(positions, None, (2, 7))
    assert mask.tolist() == [[1, 1, 2, 2, 3, 4, 4], [1] * 7]
    assert mask.packing.cu_seqlens.tolist() == [0, 2, 4, 5, 7, 14]
    assert document_mask(positions[1:], None, (1, 7)) is None


BOTH_MODELS = pytest.mark.parametrize(
    "make", [lambda: make_model(without_rotation()), make_stick_breaking_model], ids=["llama", "stickbreaking"]
)


@BOTH_MODELS
@pytest.mark.parametrize("shape", [(8,), (2, 1, 8), (3, 8), (2, 7)])
def test_masks_of_a_wrong_shape(make, shape):
    with pytest.raises(ValueError, match=mentions("attention_mask 8") + f".*{re.escape(str(shape))}"):
        make()(tokens(2, 8), attention_mask=torch.ones(shape, dtype=torch.long))


def test_a_mask_that_is_made_twice():
    """PaliGemma passes its masks to its decoder, which makes them again. The error is about the mask of the model."""
    seen_by_all = attention.attention_mask(2, 8, 8, mask_function=lambda batch, head, query, key: key >= 0)
    with pytest.raises(ValueError, match=mentions("attention_mask must be causal another mask of the model")):
        make_model(without_rotation())(tokens(2, 8), attention_mask=seen_by_all.bool())


@BOTH_MODELS
@pytest.mark.parametrize("columns", [1, 8])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_masks_must_cover_the_cache(make, cache, columns):
    """With a mask of the new tokens alone, the keys in the cache would have no mask."""
    model, ids = make(), tokens(2, 9)
    cache = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
        with pytest.raises(ValueError, match=mentions("attention_mask 9") + rf".*\(2, {columns}\)"):
            model(ids[:, 8:], attention_mask=torch.ones(2, columns, dtype=torch.long), past_key_values=cache)


@BOTH_MODELS
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_mask_of_one_row(make, cache, side):
    """It is the mask of every row, for a prompt and for a step. Columns after the keys are ignored."""
    model, ids, mask = make(), tokens(2, 9), torch.ones(1, 9, dtype=torch.long)
    mask[:, slice(0, 3) if side == "left" else slice(5, 8)] = 0
    expected = logits(model, ids, attention_mask=mask.expand(2, 9))
    cache = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        prompt = model(ids[:, :8], attention_mask=mask, past_key_values=cache).logits
        step = model(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits
    found = torch.cat([prompt, step], 1)
    torch.testing.assert_close(found[:, mask[0] > 0], expected[:, mask[0] > 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [lambda: make_model(without_rotation()), decoders.make_model])
@pytest.mark.parametrize("cache", [None, "static"])
def test_documents_and_padding_exclude_each_other(make, cache):
    """Without an error, the documents of a padded row would attend to each other."""
    model, mask = make(), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    bounds = torch.tensor([0, 5, 8], dtype=torch.int32)
    caches = {} if cache is None else {"past_key_values": StaticCache(model.config, max_cache_len=10)}
    with pytest.raises(ValueError, match=mentions("cu_seq_lens_q None attention_mask padding 2 documents")):
        logits(model, tokens(1, 8), attention_mask=mask, cu_seq_lens_q=bounds, **caches)


@pytest.mark.parametrize("bounds", [[0, 3, 9], [2, 3, 8], [0, 5, 3, 8], []], ids=str)
def test_bounds_must_match_the_row(bounds):
    """Offsets from 0 to the number of tokens that do not decrease."""
    with pytest.raises(ValueError, match=f"cu_seq_lens_q must be .* from 0 to 8, .* got {re.escape(str(bounds))} "):
        logits(make_model(without_rotation()), tokens(1, 8), cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32))


@BOTH_MODELS
@pytest.mark.parametrize(
    ("bounds", "words"),
    [([0, 3, 8], "torch.Tensor list"), (torch.tensor([0, 3.5, 8]), "integer dtype torch.float32")],
    ids=["list", "fractions"],
)
def test_bounds_must_be_integers(make, bounds, words):
    """Offsets that are no integers would be rounded."""
    with pytest.raises(TypeError, match=mentions(f"cu_seq_lens_q {words}")):
        make()(tokens(1, 8), cu_seq_lens_q=bounds)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache):
    """Generation with a cache and left padding chooses the tokens of whole forwards without a cache."""
    model, lengths, steps = make_model(without_rotation()), (9, 4), 8
    rows = [tokens(1, length) for length in lengths]
    ids, mask = padded(rows)
    options = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    found = model.generate(ids, attention_mask=mask, **options)[:, -steps:]
    assert found.tolist() == [chosen(model, row, steps) for row in rows]
    options["num_beams"] = 3
    beams = model.generate(rows[0], **options)
    assert (
        beams.tolist() == model.generate(rows[0], **options | {"cache_implementation": None}, use_cache=False).tolist()
    )


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_steps_read_the_cache_in_place(padding, monkeypatch):
    """Steps without padding or with left padding read the cache in place. With right padding they gather the keys.

    The logits equal those of a whole forward.
    """
    model, calls = make_model(without_rotation()), []
    monkeypatch.setattr(
        attention, "attend_to_filled", lambda *args, **options: calls.append(0) or attend_to_filled(*args, **options)
    )
    rows = [tokens(1, 9), tokens(1, 9 if padding is None else 5)]
    ids, mask = padded(rows, padding or "left")
    new, ones = tokens(2, 2), torch.ones(2, 2, dtype=torch.long)
    ids, mask = torch.cat([ids, new], 1), torch.cat([mask, ones], 1)
    with torch.no_grad():
        first = model(ids[:, :9], attention_mask=mask[:, :9], use_cache=True)
        step = model(ids[:, 9:], attention_mask=mask, past_key_values=first.past_key_values).logits
    assert len(calls) == (0 if padding == "right" else 2)  # one call for each layer
    torch.testing.assert_close(step, logits(model, ids, attention_mask=mask)[:, 9:], atol=1e-5, rtol=1e-4)


def test_several_tokens_with_a_cache():
    model, ids = make_model(without_rotation()), tokens(2, 20)
    first = model(ids[:, :12], use_cache=True)
    rest = model(ids[:, 12:], past_key_values=first.past_key_values)
    expected = logits(model, ids)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, atol=1e-5, rtol=1e-4)


def test_options_of_the_configuration():
    config, ids = without_rotation(attend_current=True), tokens(1, 12)
    assert (logits(make_model(config), ids) - logits(make_model(without_rotation()), ids)).abs().max() > 1e-3
    reloaded = LlamaConfig.from_dict(config.to_dict())
    assert reloaded.attend_current and reloaded.rope_parameters["rope_type"] == attention.NO_ROTATION


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("reach", (0.5, 10.0)),
        ("logits", "euclidean"),
        ("forget_gate", True),
        ("remainder_bias", True),
        ("head_norm", True),
    ],
)
def test_options_that_only_our_decoder_has(option, value):
    model, required = make_model(without_rotation(**{option: value})), attention.REQUIRED_OPTIONS[option]
    with pytest.raises(ValueError, match=mentions(f"{option} configuration {required} {value!r}")):
        logits(model, tokens(1, 8))
    setattr(model.config, option, required)
    assert logits(model, tokens(1, 8)).isfinite().all()


@pytest.mark.parametrize("rope_type", [attention.NO_ROTATION, "none"], ids=["today", "version 0.1"])
def test_saved_models_refuse_other_attention(tmp_path, rope_type):
    """Without positions softmax does not see the order of the keys, so that its logits would be wrong."""
    config = make_config()
    config.rope_parameters["rope_type"] = rope_type
    model, ids = make_model(config), tokens(1, 8)
    model.save_pretrained(tmp_path)
    for chosen_attention in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}):
        with pytest.raises(ValueError, match=mentions("attn_implementation 'stickbreaking' positions from_pretrained")):
            AutoModelForCausalLM.from_pretrained(tmp_path, **chosen_attention)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="stickbreaking")
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    for implementation in ("sdpa", "paged|eager", {"": "eager"}):  # of a model that exists
        with pytest.raises(ValueError, match=mentions("attn_implementation 'stickbreaking' positions")):
            loaded.set_attn_implementation(implementation)
    loaded.set_attn_implementation("stickbreaking")
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_other_models_change_their_attention():
    """Importing the package leaves `set_attn_implementation` of models with positions as it is."""
    model = AutoModelForCausalLM.from_config(make_config(), attn_implementation="sdpa")
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"


WITHOUT_IMPORT = """
import sys
import torch
from transformers import AutoModelForCausalLM
without_positions, ours, logits = sys.argv[1:]
try:
    AutoModelForCausalLM.from_pretrained(without_positions)
except KeyError as error:
    print(error)
assert "megatron_sb" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(ours, trust_remote_code=True)
torch.save(model(torch.arange(1, 9)[None]).logits, logits)
"""


def test_programs_that_do_not_import_the_package(tmp_path):
    """They get an error that names the import. The package's own models contain a file that imports it."""
    make_model(without_rotation()).save_pretrained(tmp_path / "without_positions")
    model = decoders.make_model(**SIZES)
    model.save_pretrained(tmp_path / "ours")
    paths = [tmp_path / name for name in ("without_positions", "ours", "logits.pt")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_IMPORT, *paths], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(mentions("import megatron_sb.huggingface"), done.stdout)
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), logits(model, torch.arange(1, 9)[None]))


def test_rotary_parameters_by_layer():
    """Gemma 3 has rotary parameters for each type of layer. without_positions() disables all of them."""
    config = without_rotation("gemma3_text", head_dim=16, sliding_window=4, layer_types=["full_attention"] * 2)
    assert {parameters["rope_type"] for parameters in config.rope_parameters.values()} == {attention.NO_ROTATION}
    ids = tokens(1, 8)
    torch.testing.assert_close(logits(make_model(config), ids), oracle_logits(config, ids), atol=2e-5, rtol=1e-4)


def test_rotary_parameters_of_some_channels():
    """The rope_type "proportional" (Gemma 4) has angles for all channels, whatever its partial_rotary_factor is."""
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0}
    config, ids = without_rotation(rope_parameters=rope), tokens(1, 8)
    torch.testing.assert_close(logits(make_model(config), ids), oracle_logits(config, ids), atol=2e-5, rtol=1e-4)


def own_softmax():
    """Make a configuration with rotary positions whose model ignores attn_implementation."""
    return GPTNeoXJapaneseConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_multiple_size=1
    )


def test_the_list_of_decoders_that_ignore_the_attention_is_complete():
    """transformers looks in the code of a model for its interface of attentions. The others have no rotary positions,
    or raise KeyError for a name that they do not know."""
    ignoring = {
        config.model_type
        for config, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()
        if model.__module__.startswith("transformers.")  # and not registered by another package
        and "rope_parameters" in {field.name for field in dataclasses.fields(config)}
        and not model._can_set_attn_implementation()
    }
    assert ignoring - {"falcon", StickBreakingConfig.model_type} == set(attention.OWN_ATTENTION)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: make_config(), "rope_type 'default' without_positions"),
        (lambda: GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCAB), "'gpt2' positions"),
        (
            lambda: BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=VOCAB),
            "'bloom' positions",
        ),
        (lambda: own_softmax(), "'gpt_neox_japanese' attention of attn_implementation"),
        (lambda: without_positions(own_softmax()), "'gpt_neox_japanese' attention of attn_implementation"),
        (lambda: without_rotation("mistral", sliding_window=4), "sliding_window 4 None"),
        (lambda: without_rotation("gemma2", head_dim=16, layer_types=["full_attention"] * 2), "softcap 50.0 None"),
        (lambda: without_rotation("llama", is_causal=False), "is_causal False True"),
    ],
    ids=["rotary", "learned", "own attention", "own softmax", "own at once", "window", "soft cap", "bidirectional"],
)
def test_unsupported_models(config, words):
    with pytest.raises(ValueError, match=mentions(words)):
        logits(make_model(config()), tokens(1, 8))


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("deepseek_v32", {"index_topk": 4, "n_group": 1, "topk_group": 1}, "index_topk 4 None"),
        (
            "minimax_m3_vl_text",
            {"layer_types": ["full_attention", "minimax_m3_sparse"], "head_dim": 16, "index_head_dim": 16},
            "block_indices shape None",
        ),
    ],
)
def test_models_that_select_keys(name, fields, words):
    """Their indexer selects the keys of each query. The attention would silently read all keys."""
    sizes = {"num_key_value_heads": 4, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
    model = make_model(without_rotation(name, **sizes, **fields))
    with pytest.raises(ValueError, match=mentions(words)):
        logits(model, tokens(1, 8))


@pytest.mark.parametrize("name", ["sinks", "s_aux"])
def test_sinks_raise_an_error(name):
    """Decoders of transformers have two names for them."""
    module = make_model(without_rotation()).model.layers[0].self_attn
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(ValueError, match=mentions(f"{name} None shape (4,)")):
        attention.attention_forward(module, q, q, q, None, **{name: torch.zeros(4)})


def test_unsupported_calls():
    model, ids = make_model(without_rotation(attention_dropout=0.1)), tokens(2, 8)
    with pytest.raises(ValueError, match=mentions("dropout 0.1 0")):
        model.train()(ids)
    model.eval()
    with pytest.raises(ValueError, match=mentions("attention_mask 4")):
        model(ids, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match=mentions("output_attentions False True")):
        make_model(without_rotation(output_attentions=True))(ids)
    with pytest.raises(ValueError, match=mentions("'gpt2' rope_parameters")):
        without_positions(GPT2Config())
    with pytest.raises(TypeError, match=mentions("config PreTrainedConfig LlamaForCausalLM")):
        without_positions(model)
