"""The load-balancing loss of mixtures of experts, and the loss of labels that are shifted before the model."""

import copy

import pytest
import torch
from support import decoders
from support.decoders import GATES, padded
from support.messages import mentions
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)

from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM, byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, CHOSEN, LAYERS, VOCAB = 5, 2, 2, 257
DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
SIZES = DENSE | {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
COEFFICIENT = 0.25


def make_model(**fields):
    return decoders.make_model(**SIZES | fields)


def tokens(*shape):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(4))


def router_inputs(model, **call):
    """Return the inputs of the routers in a forward, (b, s, hidden_size) for each layer, and its output."""
    found = []
    hooks = [layer.mlp.register_forward_pre_hook(lambda _, args: found.append(args[0])) for layer in model.model.layers]
    made = model(**call, output_router_logits=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found, made


def formula(layers, chosen=CHOSEN):
    """Return experts * sum of share * probability over experts, in float64, by a loop over tokens.

    layers: router logits (tokens, experts) of each layer. The share of an expert is the number of times that it is
    chosen, and its probability the mean softmax, both over the tokens of all layers.
    """
    rows = [row for logits in layers for row in logits.double()]
    experts = len(rows[0])
    times, probability = [0] * experts, 0
    for row in rows:
        for expert in sorted(range(experts), key=lambda e: -row[e].item())[:chosen]:
            times[expert] += 1
        probability = probability + (row - row.max()).exp() / (row - row.max()).exp().sum()
    return experts * sum(n / len(rows) * p / len(rows) for n, p in zip(times, probability, strict=True))


def logits_of(model, inputs):
    """Return the router logits of each layer in float64, from the inputs and the weights of its router."""
    layers = zip(model.model.layers, inputs, strict=True)
    return [x.flatten(0, 1).double() @ layer.mlp.router.weight.double().T for layer, x in layers]


@pytest.mark.parametrize("chosen", [1, 2, 5])
def test_the_loss_equals_its_formula(chosen):
    model, ids = make_model(num_experts_per_tok=chosen, router_aux_loss_coef=COEFFICIENT), tokens(3, 8)
    inputs, made = router_inputs(model, input_ids=ids, labels=ids)
    expected = logits_of(model, inputs)
    for found, logits in zip(made.router_logits, expected, strict=True):
        assert found.dtype == torch.float32 and found.shape == (24, EXPERTS)
        torch.testing.assert_close(found.double(), logits, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(made.aux_loss.double(), formula(expected, chosen), atol=0, rtol=1e-5)
    plain = model(ids, labels=ids, use_cache=False)
    torch.testing.assert_close(made.loss, plain.loss + COEFFICIENT * made.aux_loss)
    assert chosen == EXPERTS or abs(made.aux_loss.item() - chosen) > 0.01


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side):
    """The loss is that of the tokens of rows without padding, also where a row is nothing else."""
    model, rows = make_model(), [tokens(1, 9), tokens(1, 4), tokens(1, 0)]
    ids, mask = padded(rows, side)
    assert (mask.sum(1) == torch.tensor([9, 4, 0])).all()
    made = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    alone = [router_inputs(model, input_ids=row)[0] for row in rows[:2]]
    together = [torch.cat(layers, 1) for layers in zip(*alone, strict=True)]
    torch.testing.assert_close(made.aux_loss.double(), formula(logits_of(model, together)), atol=1e-5, rtol=1e-5)
    everything = formula(made.router_logits)
    assert abs(made.aux_loss - everything) > 0.01


def test_new_tokens_of_a_cache():
    """A mask has columns for older keys. The loss is that of the new tokens only."""
    model = make_model().requires_grad_(False)
    ids, mask = padded([tokens(1, 12), tokens(1, 8)])
    whole = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    made = model(ids[:, 5:], attention_mask=mask, past_key_values=cache, output_router_logits=True)
    assert isinstance(made, MoeCausalLMOutputWithPast)
    new = [logits.view(2, 12, -1)[:, 5:].flatten(0, 1) for logits in whole.router_logits]
    torch.testing.assert_close(made.aux_loss.double(), formula(new), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompts", [(12, 8), (12, 0)])
def test_a_new_token_of_a_static_cache(prompts):
    """A row that is only padding does not count."""
    model = make_model()
    ids, mask = padded([tokens(1, length) for length in prompts])
    cache = StaticCache(model.config, max_cache_len=16)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, output_router_logits=True, use_cache=False)
        model(ids[:, :11], attention_mask=mask[:, :11], past_key_values=cache)
        made = model(ids[:, 11:], attention_mask=mask, past_key_values=cache, output_router_logits=True)
    new = [logits.view(2, 12, -1)[: len(prompts) - prompts.count(0), 11] for logits in whole.router_logits]
    torch.testing.assert_close(made.aux_loss.double(), formula(new), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generation_with_router_logits(kind):
    """A configuration that requests the loss, as TRL leaves it, generates the same tokens."""
    model, (ids, mask) = make_model(), padded([tokens(1, 7), tokens(1, 4)])
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, cache_implementation=kind, **options)
    model.config.output_router_logits = True
    assert torch.equal(model.generate(ids, cache_implementation=kind, **options), expected)


@pytest.mark.parametrize("chosen", [1, 2])
def test_known_values(chosen):
    """Balanced routing has the loss num_experts_per_tok. One expert for everything has the loss num_experts."""
    model = make_model(num_experts_per_tok=chosen, num_hidden_layers=1)
    norm, router = model.model.layers[0].post_attention_layernorm, model.model.layers[0].mlp.router
    best = torch.arange(3 * EXPERTS) % EXPERTS  # of each token; its second expert is the next one

    def routed(best):
        inputs = torch.nn.functional.one_hot(best, 32) + 0.5 * torch.nn.functional.one_hot((best + 1) % EXPERTS, 32)
        hook = norm.register_forward_hook(lambda *_: inputs[None].float())
        loss = model(tokens(1, len(best)), output_router_logits=True, use_cache=False).aux_loss.item()
        hook.remove()
        return loss

    with torch.no_grad():
        router.weight.copy_(60 * torch.eye(EXPERTS, 32))
    assert routed(best) == pytest.approx(chosen, abs=1e-5)
    assert routed(torch.zeros_like(best)) == pytest.approx(EXPERTS, abs=1e-4)


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_relation_to_the_loss_of_the_trainer(layers):
    """Megatron-Core's loss of a layer is the loss of this layer alone, divided by num_experts_per_tok."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="needs Megatron-Core")
    made = make_model(num_hidden_layers=layers)(tokens(2, 8), output_router_logits=True, use_cache=False)
    losses = []
    for logits in made.router_logits:
        chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, CHOSEN, "softmax")
        sizes = {"total_num_tokens": 16, "topk": CHOSEN, "num_experts": EXPERTS, "moe_aux_loss_coeff": 1.0}
        losses.append(moe_utils.switch_load_balancing_loss_func(scores, chosen.sum(0), **sizes))
        torch.testing.assert_close(losses[-1].double(), formula([logits]) / CHOSEN, atol=1e-5, rtol=1e-5)
    if layers == 1:
        torch.testing.assert_close(made.aux_loss, CHOSEN * losses[0])
    else:
        assert abs(made.aux_loss - CHOSEN * sum(losses) / layers) > 1e-3  # a product of means over layers


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradients_reach_the_router():
    """They are those of the formula, and are added to those of the labels with the coefficient."""
    model, ids = make_model(router_aux_loss_coef=COEFFICIENT), tokens(2, 8)
    expected = gradients_of(model, formula(logits_of(model, router_inputs(model, input_ids=ids)[0])))
    found = gradients_of(model, model(ids, use_cache=False, output_router_logits=True).aux_loss)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-3, msg=name)
    for layer in range(LAYERS):
        assert found[f"model.layers.{layer}.mlp.router.weight"].abs().max() > 1e-4
    plain = gradients_of(model, model(ids, labels=ids, use_cache=False).loss)
    both = gradients_of(model, model(ids, labels=ids, use_cache=False, output_router_logits=True).loss)
    for name, gradient in plain.items():
        wanted = gradient + COEFFICIENT * found.get(name, 0)
        torch.testing.assert_close(both[name], wanted, atol=1e-5, rtol=1e-3, msg=name)


def test_router_logits_under_autocast():
    """They are fp32, and those of the formula for the rounded inputs that routers get."""
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        inputs, made = router_inputs(model, input_ids=tokens(2, 8))
    for found, expected in zip(made.router_logits, logits_of(model, inputs), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    """The loss and all gradients have the bits of training without it."""
    model, (ids, mask) = make_model(**GATES, output_router_logits=True).train(), padded([tokens(1, 9), tokens(1, 5)])
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    expected = model(**call)
    gradients = gradients_of(model, expected.loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = model(**call)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.aux_loss, expected.aux_loss)
    found_gradients = gradients_of(model, found.loss)
    assert found_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(found_gradients[name], gradient), name


def test_compiled_model():
    torch._dynamo.reset()
    model, (ids, mask) = make_model(), padded([tokens(1, 9), tokens(1, 5)])
    call = {"input_ids": ids, "attention_mask": mask, "labels": ids, "output_router_logits": True, "use_cache": False}
    expected, found = (f(**call) for f in (model, torch.compile(model, backend="eager")))
    torch.testing.assert_close((found.loss, found.aux_loss), (expected.loss, expected.aux_loss))


def test_outputs_without_router_logits_stay_the_same():
    """Their classes, fields and bits, with experts and without."""
    ids = tokens(2, 8)
    for model in (decoders.make_model(**DENSE), make_model()):
        plain = model(ids, labels=ids)
        assert type(plain) is CausalLMOutputWithPast and type(model.model(ids)) is BaseModelOutputWithPast
        assert len(model(ids, labels=ids, use_cache=False, return_dict=False)) == 2
    routed = model(ids, labels=ids, output_router_logits=True, output_hidden_states=True)
    assert type(routed) is MoeCausalLMOutputWithPast and len(routed.hidden_states) == LAYERS + 1
    assert torch.equal(routed.logits, plain.logits)
    base = model.model(ids, output_router_logits=True)
    assert type(base) is MoeModelOutputWithPast and torch.equal(base.router_logits[0], routed.router_logits[0])
    parts = model(ids, labels=ids, output_router_logits=True, use_cache=False, return_dict=False)
    assert [part.shape for part in parts[:3]] == [(), (), (2, 8, VOCAB)] and len(parts[3]) == LAYERS


def test_the_options_are_saved(tmp_path):
    """A saved folder gives them back. A model without experts saves a configuration that loads."""
    model, ids = make_model(output_router_logits=True, router_aux_loss_coef=COEFFICIENT), tokens(1, 8)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.output_router_logits and loaded.config.router_aux_loss_coef == COEFFICIENT
    assert torch.equal(loaded(ids, labels=ids).loss, model(ids, labels=ids).loss)
    decoders.make_model(**DENSE).save_pretrained(tmp_path / "dense")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "dense").config.router_aux_loss_coef == 0


def busiest_share(coefficient):
    """Train 30 steps from a router that prefers an expert. Return the share of tokens that the busiest expert gets."""
    fields = {"num_experts_per_tok": 1, "num_hidden_layers": 1, "output_router_logits": True}
    model, ids = make_model(**fields, router_aux_loss_coef=coefficient), tokens(4, 32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mean = router_inputs(model, input_ids=ids)[0][0].mean((0, 1))
    with torch.no_grad():
        model.model.layers[0].mlp.router.weight[0] += 8 * mean / mean.square().sum()
    model.train()
    for _ in range(30):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    with torch.no_grad():
        (routing,) = model.eval()(ids, use_cache=False).router_logits
    return routing.argmax(-1).bincount(minlength=EXPERTS).max().item() / ids.numel()


def test_training_evens_the_load():
    without, balanced = busiest_share(0.0), busiest_share(1.0)
    assert balanced < 0.8 * without, (without, balanced)


def make_sft_trainer(model, folder, **options):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    trl = pytest.importorskip("trl", reason="needs trl")
    documents = datasets.Dataset.from_dict({"text": [f"{age} years old. " * (1 + age % 3) for age in range(20, 36)]})
    options |= {"max_steps": 2, "per_device_train_batch_size": 8, "bf16": False, "use_cpu": True, "logging_steps": 1}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "output_dir": str(folder)}
    return trl.SFTTrainer(model, trl.SFTConfig(**options), train_dataset=documents, processing_class=byte_tokenizer())


SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 256)


def test_trl_adds_the_loss(tmp_path):
    """Its loss is that of the model: cross-entropy and the load-balancing loss of the tokens of a padded batch."""
    model = StickBreakingForCausalLM(StickBreakingConfig(**SIZES, **SPECIAL))
    trainer = make_sft_trainer(model, tmp_path, router_aux_loss_coef=COEFFICIENT)
    assert model.config.output_router_logits and model.config.router_aux_loss_coef == COEFFICIENT
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        expected, found = copy.deepcopy(model)(**batch), trainer.compute_loss(model, dict(batch))
        plain = model(**batch, output_router_logits=False).loss
    torch.testing.assert_close(found, expected.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, plain + COEFFICIENT * expected.aux_loss, atol=1e-5, rtol=1e-5)
    before = model.model.layers[0].mlp.router.weight.clone()
    trainer.train()
    logged = [entry["aux_loss"] for entry in trainer.state.log_history if "aux_loss" in entry]
    assert len(logged) == 2 and all(value > CHOSEN - 1 for value in logged)
    assert not torch.equal(model.model.layers[0].mlp.router.weight, before)


def test_trl_without_experts(tmp_path):
    """The default trains. A coefficient is an error that names the option."""
    model = StickBreakingForCausalLM(StickBreakingConfig(**DENSE, **SPECIAL))
    assert make_sft_trainer(model, tmp_path).aux_loss_enabled is False
    with pytest.raises(ValueError, match=mentions("output_router_logits False num_experts True router_aux_loss_coef")):
        make_sft_trainer(model, tmp_path, router_aux_loss_coef=0.01).train()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        (DENSE | {"output_router_logits": True}, ValueError, "output_router_logits False num_experts True"),
        (DENSE | {"router_aux_loss_coef": 0.01}, ValueError, "router_aux_loss_coef 0 num_experts 0.01"),
        (SIZES | {"router_aux_loss_coef": -1.0}, ValueError, "router_aux_loss_coef 0 -1.0"),
        (SIZES | {"router_aux_loss_coef": float("nan")}, ValueError, "router_aux_loss_coef 0 nan"),
        (SIZES | {"router_aux_loss_coef": "0.1"}, TypeError, "router_aux_loss_coef number str"),
        (SIZES | {"output_router_logits": 1}, TypeError, "output_router_logits True False int"),
    ],
)
def test_invalid_configurations(fields, error, words):
    with pytest.raises(error, match=mentions(words)):
        StickBreakingConfig(**fields)


def test_defaults_and_invalid_calls():
    assert StickBreakingConfig(**SIZES).router_aux_loss_coef == 0.001
    assert StickBreakingConfig(**DENSE).router_aux_loss_coef == 0
    assert not StickBreakingConfig(**SIZES).output_router_logits
    model = decoders.make_model(**DENSE)
    for part in (model, model.model):
        with pytest.raises(ValueError, match=mentions("output_router_logits False num_experts True")):
            part(tokens(1, 4), output_router_logits=True)
    assert model(tokens(1, 4), output_router_logits=False).logits.shape == (1, 4, VOCAB)


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_mask_of_one_row(use_cache):
    """It counts as the mask of every row."""
    model, ids, mask = decoders.make_model(**SIZES), tokens(2, 8), torch.ones(1, 8, dtype=torch.long)
    mask[0, :3] = 0
    options = {"output_router_logits": True, "use_cache": use_cache}
    expected = model(ids, attention_mask=mask.expand(2, 8), **options).aux_loss
    assert torch.equal(model(ids, attention_mask=mask, **options).aux_loss, expected)
    assert (model(ids, **options).aux_loss - expected).abs() > 1e-4


@pytest.mark.parametrize("items", [None, 7])
def test_labels_that_are_shifted_before_the_model(items):
    """The halves of a row, with the next token of each position, have the loss and the logits of the row."""
    model, ids = decoders.make_model(**DENSE), tokens(2, 8)
    labels = ids.clone()
    labels[0, :3] = -100
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = model(ids, labels=labels, num_items_in_batch=items)
    for given in ({}, {"labels": labels}, {"labels": shifted}):
        found = model(ids, shift_labels=shifted, num_items_in_batch=items, **given)
        assert torch.equal(found.loss, expected.loss)
    cache = DynamicCache(config=model.config)
    halves = [
        model(part, shift_labels=wanted, num_items_in_batch=1, past_key_values=cache).loss
        for part, wanted in zip(ids.split(4, 1), shifted.split(4, 1), strict=True)
    ]
    count = items or (shifted != -100).sum()
    torch.testing.assert_close(sum(halves) / count, expected.loss)
