"""examples/vllm: an attention backend and a model of vLLM. Its modules are called directly, and by vLLM's engine."""

import importlib
import json
import types
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.launch import run_worker

from megatron_sb import reference

vllm = pytest.importorskip("vllm", reason="needs vLLM")
EXAMPLE = Path(__file__).parents[3] / "examples/vllm"
BLOCK, HEADS, KV_HEADS, DIM = 16, 4, 2, 32


@pytest.fixture
def plugin(monkeypatch):
    """The module of the example, with a model without positions that has no options of its own."""
    monkeypatch.syspath_prepend(EXAMPLE)
    module = importlib.import_module("megatron_sb_vllm")
    text = types.SimpleNamespace(model_type="llama", rope_parameters={"rope_type": module.attention.NO_ROTATION})
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_text_config=text))
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    return module


def make_cache(plugin, num_blocks: int, layers: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A cache in the layout of the backend. With `layers`, blocks of several layers lie between its blocks."""
    shape = plugin.StickBreakingBackend.get_kv_cache_shape(num_blocks, BLOCK, KV_HEADS, DIM)
    if layers:
        order = plugin.StickBreakingBackend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        shape = (3, *shape)
    else:
        order = plugin.StickBreakingBackend.get_kv_cache_stride_order()
    memory = torch.full([shape[i] for i in order], float("nan"), dtype=dtype)
    cache = memory.permute([order.index(i) for i in range(len(order))])
    return cache[1] if layers else cache


def builder_of(plugin, **config):
    spec = types.SimpleNamespace(block_size=BLOCK)
    return plugin.StickBreakingMetadataBuilder(
        spec, ["layer"], types.SimpleNamespace(**{"speculative_config": None, **config}), torch.device("cpu")
    )


def common_metadata(queries: list[int], keys: list[int], known: bool):
    """The metadata of a step of vLLM, and for each request the slots of its keys."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(keys, dtype=torch.int32)
    most = max(-(-n // BLOCK) for n in keys)
    blocks = torch.randperm(most * len(keys) + 3)[: most * len(keys)].view(len(keys), most)
    slots = [blocks[r, torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for r, n in enumerate(keys)]
    new = torch.cat([s[n - q :] for s, q, n in zip(slots, queries, keys, strict=True)])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=len(queries),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(keys),
        block_table_tensor=blocks.int(),
        slot_mapping=torch.cat((new, torch.tensor([-1, -1]))),  # padding
        seq_lens_cpu_upper_bound=seq_lens if known else None,
    )
    return common, slots


@pytest.mark.parametrize("layers", [False, True], ids=["one layer", "several layers in one tensor"])
@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths on the device"])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([1, 1, 1], [40, 1, 17]),
        ([20, 35], [20, 35]),
        ([1, 1, 20, 35], [40, 7, 20, 50]),
        ([6, 33], [70, 33]),
    ],
    ids=["decodes", "prompts", "decodes, a prompt and a chunk", "chunks"],
)
def test_a_step_computes_stickbreaking_attention(plugin, queries, keys, known, layers):
    torch.manual_seed(0)
    common, slots = common_metadata(queries, keys, known)
    cache = make_cache(plugin, int(common.block_table_tensor.max()) + 1, layers)
    all_keys, all_values = ([torch.randn(n, KV_HEADS, DIM) for n in keys] for _ in range(2))
    for slot, k, v, q in zip(slots, all_keys, all_values, queries, strict=True):
        old = slot[: len(slot) - q]
        cache.transpose(1, 2)[old // BLOCK, old % BLOCK] = torch.cat((k, v), dim=-1)[: len(old)]
    tokens = common.num_actual_tokens
    query, output = torch.randn(tokens + 2, HEADS, DIM), torch.full((tokens + 2, HEADS, DIM), 7.0)
    key, value = (
        torch.cat([*(x[len(x) - q :] for x, q in zip(of, queries, strict=True)), torch.full((2, KV_HEADS, DIM), 9.0)])
        for of in (all_keys, all_values)
    )
    metadata = builder_of(plugin).build(0, common)
    impl = plugin.StickBreakingImpl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    impl.forward(None, query, key, value, cache, metadata, output)
    for (begin, end), k, v in zip(pairwise(common.query_start_loc.tolist()), all_keys, all_values, strict=True):
        exact = reference.stickbreaking_attention(query[None, begin:end], k[None], v[None])[0]
        torch.testing.assert_close(output[begin:end].double(), exact, rtol=1e-4, atol=1e-5)
    assert torch.equal(output[tokens:], torch.full((2, HEADS, DIM), 7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cache_in_another_dtype(plugin, dtype):
    """As with --kv-cache-dtype. A step has decodes, and prompts whose keys are not, or partly, in the cache."""
    for queries, keys in (([1, 1], [40, 7]), ([20, 35], [20, 35]), ([1, 20], [1, 50])):
        common, slots = common_metadata(queries, keys, known=True)
        cache = make_cache(plugin, int(common.block_table_tensor.max()) + 1, dtype=dtype)
        all_keys, all_values = ([torch.randn(n, KV_HEADS, DIM).to(dtype).float() for n in keys] for _ in range(2))
        for slot, k, v in zip(slots, all_keys, all_values, strict=True):
            cache.transpose(1, 2)[slot // BLOCK, slot % BLOCK] = torch.cat((k, v), dim=-1).to(dtype)
        key, value = (
            torch.cat([x[len(x) - q :] for x, q in zip(of, queries, strict=True)]) for of in (all_keys, all_values)
        )
        query = torch.randn(common.num_actual_tokens, HEADS, DIM).to(dtype).float()
        output = torch.empty_like(query)
        impl = plugin.StickBreakingImpl(HEADS, DIM, DIM**-0.5, KV_HEADS)
        impl.forward(None, query, key, value, cache, builder_of(plugin).build(0, common), output)
        for (begin, end), k, v in zip(pairwise(common.query_start_loc.tolist()), all_keys, all_values, strict=True):
            exact = reference.stickbreaking_attention(query[None, begin:end], k[None], v[None])[0]
            torch.testing.assert_close(output[begin:end].double(), exact, rtol=3e-2, atol=3e-2)


def test_options_of_the_model(plugin):
    config = plugin.get_current_vllm_config().model_config.hf_text_config
    config.attend_current, config.mass_threshold = True, 0.0
    impl = plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)
    assert impl.scale == 0.5 and impl.options == {"attend_current": True, "mass_threshold": 0.0}


@pytest.mark.parametrize(
    ("name", "value", "error"), [("mass_threshold", 2, ValueError), ("attend_current", "yes", TypeError)]
)
def test_invalid_options_of_the_model_are_errors_when_it_is_loaded(plugin, name, value, error):
    """vLLM measures memory without a call of the attention, so the first request would end the engine."""
    setattr(plugin.get_current_vllm_config().model_config.hf_text_config, name, value)
    with pytest.raises(error, match=f"{name} must be .* got"):
        plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)


@pytest.mark.parametrize(("queries", "keys"), [([1, 1], [9, 20]), ([20], [20])], ids=["decodes", "prompt"])
def test_a_scale_that_vllm_sets_later(plugin, queries, keys):
    """vLLM's function for transformers sets it in each forward, for example to Granite's attention_multiplier."""
    common, slots = common_metadata(queries, keys, known=True)
    cache = make_cache(plugin, int(common.block_table_tensor.max()) + 1)
    all_keys, all_values = ([torch.randn(n, KV_HEADS, DIM) for n in keys] for _ in range(2))
    for slot, k, v in zip(slots, all_keys, all_values, strict=True):
        cache.transpose(1, 2)[slot // BLOCK, slot % BLOCK] = torch.cat((k, v), dim=-1)
    key, value = (
        torch.cat([x[len(x) - q :] for x, q in zip(of, queries, strict=True)]) for of in (all_keys, all_values)
    )
    query = torch.randn(common.num_actual_tokens, HEADS, DIM)
    impl, output = plugin.StickBreakingImpl(HEADS, DIM, DIM**-0.5, KV_HEADS), torch.empty_like(query)
    impl.scale = 0.7
    impl.forward(None, query, key, value, cache, builder_of(plugin).build(0, common), output)
    for (begin, end), k, v in zip(pairwise(common.query_start_loc.tolist()), all_keys, all_values, strict=True):
        exact = reference.stickbreaking_attention(query[None, begin:end], k[None], v[None], scale=0.7)[0]
        torch.testing.assert_close(output[begin:end].double(), exact, rtol=1e-4, atol=1e-5)


def test_tokens_without_a_slot_change_no_block_of_a_request(plugin):
    """vLLM's runs without requests, as of an idle data-parallel rank, have a slot of -1 for each token."""
    common, _ = common_metadata([1, 1], [1, 1], known=True)
    common.slot_mapping.fill_(-1)
    cache = make_cache(plugin, 6)
    cache.fill_(3.0)
    query, key, value = (torch.randn(2, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    impl = plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)
    impl.forward(None, query, key, value, cache, builder_of(plugin).build(0, common), torch.empty_like(query))
    assert (cache[1:] == 3).all()  # block 0 belongs to no request


def test_while_vllm_measures_memory_the_output_is_0(plugin):
    impl = plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)
    output = torch.ones(3, HEADS, DIM)
    assert impl.forward(None, *[output] * 3, torch.tensor([]), None, output).count_nonzero() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sliding_window": 128}, "sliding_window must be None"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes must be None"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap must be None"),
        ({"sinks": torch.zeros(4)}, "sinks must be None"),
        ({"attn_type": "encoder"}, "attn_type must be 'decoder', got 'encoder'"),
    ],
)
def test_what_vllm_must_not_ask_for(plugin, options, words):
    with pytest.raises(ValueError, match=words):
        plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS, **options)


def test_a_model_with_positions_is_an_error(plugin):
    """Its weights were trained with softmax, or with positions, and vLLM would rotate queries and keys."""
    config = plugin.get_current_vllm_config().model_config.hf_text_config
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(ValueError, match=r"rope_type in rope_parameters must be .* got 'default'"):
        plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)


@pytest.mark.parametrize(
    ("name", "value", "required"), [("reach", [0.5, 10.0], "None"), ("logits", "euclidean", "dot")]
)
def test_options_that_decoders_do_not_have_are_errors(plugin, name, value, required):
    """They were ignored. transformers refuses them in the first forward, which vLLM replaces."""
    setattr(plugin.get_current_vllm_config().model_config.hf_text_config, name, value)
    with pytest.raises(ValueError, match=f"{name} of the configuration must be '?{required}'? with .* got "):
        plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)


def test_layers_that_attend_in_chunks_are_an_error(plugin):
    """As in Llama 4. vLLM passes nothing that says so, and its layers would attend to all keys."""
    config = plugin.get_current_vllm_config().model_config.hf_text_config
    config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"layer_types of the configuration .* got 'chunked_attention'"):
        plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)
    config.layer_types = ["full_attention", "full_attention"]
    plugin.StickBreakingImpl(HEADS, DIM, 0.5, KV_HEADS)


def test_speculative_decoding_is_an_error(plugin):
    with pytest.raises(ValueError, match="speculative_config must be None"):
        builder_of(plugin, speculative_config=object())


def test_vllm_finds_the_backend(plugin):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    plugin.register()
    backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend is plugin.StickBreakingBackend and AttentionBackendEnum[backend.get_name()].get_class() is backend
    assert backend.supports_head_size(64) and not backend.supports_head_size(60)
    if hasattr(backend, "get_kv_cache_block_dim"):  # vLLM 0.26
        assert backend.get_kv_cache_block_dim(BLOCK, KV_HEADS, DIM) == 0 and backend.indexes_kv_by_block_stride()
    else:
        assert [layout.name for layout in backend.supported_kv_cache_layouts()] == ["LBNHC", "BLNHC"]


@pytest.mark.parametrize(
    ("backend", "of_full_attention", "works"),
    [("CUSTOM", None, True), (None, None, False), ("CUSTOM", "FLASH_ATTN", False), (None, "CUSTOM", True)],
)
def test_a_model_without_positions_needs_this_backend(plugin, backend, of_full_attention, works):
    """vLLM's option backend_per_kind can choose another one for its layers."""
    from transformers import LlamaConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from megatron_sb.huggingface import without_positions

    chosen = AttentionBackendEnum[backend] if backend else None
    per_kind = {"full_attention": AttentionBackendEnum[of_full_attention]} if of_full_attention else {}
    options = types.SimpleNamespace(backend=chosen, backend_per_kind=per_kind)
    plugin.get_current_vllm_config().attention_config = options
    config = without_positions(LlamaConfig(hidden_size=128, num_attention_heads=4))
    config._attn_implementation = "vllm"
    if works:
        frequencies, factor = plugin._no_rotation(config)
        assert frequencies.count_nonzero() == 0 and factor == 1.0 and config._attn_implementation == "vllm"
    else:
        with pytest.raises(ValueError, match="--attention-backend CUSTOM"):
            plugin._no_rotation(config)


def needs_stacked_weights() -> None:
    """Skip with vLLM 0.26, which loads weights in another way."""
    from vllm.model_executor.models.utils import WeightsMapper

    if not hasattr(WeightsMapper(), "orig_to_new_stacked"):
        pytest.skip("needs vLLM 0.33")


ALL_OPTIONS = {
    "reach": [0.5, 10.0],
    "remainder_bias": True,
    "head_norm": True,
    "qkv_bias": True,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (1, ALL_OPTIONS),
        (1, {"tie_word_embeddings": True, "attend_current": True, "logits": "euclidean", "attention_multiplier": 0.02}),
        (2, {**ALL_OPTIONS, "forget_gate": True}),
        (4, {"logits": "euclidean", "forget_gate": True, "attention_multiplier": 0.02}),
    ],
    ids=["plain", "dot products", "Euclidean logits", "gates on two ranks", "more ranks than KV heads"],
)
def test_the_model_of_this_project(ranks, options, tmp_path):
    """A prompt in two chunks, and single tokens, have the logits of transformers."""
    needs_stacked_weights()
    assert run_worker("vllm_model.py", ranks, tmp_path / "found.json", json.dumps(options))["error"] < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"reach": [0.5, 10.0], "remainder_bias": True, "head_norm": True},
        {"logits": "euclidean", "forget_gate": True, "attention_multiplier": 0.02},
    ],
    ids=["reach", "Euclidean logits and gates"],
)
def test_the_engine_with_the_model_of_this_project(options, tmp_path):
    needs_stacked_weights()
    found = run_worker("vllm_engine.py", 1, tmp_path / "found.json", json.dumps(options))
    assert found["tokens"] == [found["wanted"]] * 2 and found["cached"] > 50


def test_experts_of_this_project_are_an_error(tmp_path):
    needs_stacked_weights()
    options = {"num_experts": 4, "num_experts_per_tok": 2}
    found = run_worker("vllm_model.py", 1, tmp_path / "found.json", json.dumps(options))
    assert found["refused"] == "num_experts of the configuration must be None in vLLM, got 4."


def test_keys_with_columns_need_the_cache_of_their_dtype(plugin):
    settings = plugin.LayerSettings({"logits": "euclidean"}, head_dim=DIM)
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be 'auto' .* got 'bfloat16'"):
        plugin.StickBreakingImpl(HEADS, DIM + 8, 0.5, KV_HEADS, kv_cache_dtype="bfloat16", settings=settings)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A saved model, prompts of 5 to 2,000 tokens, and the 20 tokens that transformers generates after each.

    vLLM changes the classes of transformers, so this comes before its engine.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    from megatron_sb.huggingface import without_positions

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(without_positions(config), attn_implementation="stickbreaking")
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    model.eval().cuda()
    prompts = [torch.randint(512, (length,)).tolist() for length in (5, 100, 700, 2000)]
    tokens = [
        model.generate(torch.tensor([prompt]).cuda(), do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    return str(folder), prompts, tokens


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [8192, 512], ids=["whole prompts", "prompts in chunks"])
def test_the_engine_generates_the_tokens_of_transformers(monkeypatch, generated, budget):
    """All prompts in one batch, and again from the prefix cache, in fp32."""
    folder, prompts, tokens = generated
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in this process
    monkeypatch.syspath_prepend(EXAMPLE)
    importlib.import_module("megatron_sb_vllm").register()
    engine = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        model_impl="transformers",
        attention_backend="CUSTOM",
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=True,
        gpu_memory_utilization=0.3,
        enforce_eager=True,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    for _ in range(2):
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
        assert [list(output.outputs[0].token_ids) for output in outputs] == tokens
    assert outputs[-1].num_cached_tokens > 1000
