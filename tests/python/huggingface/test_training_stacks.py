"""Training with transformers' Trainer, with accelerate, and with TRL's SFTTrainer on packed documents."""

from functools import partial

import pytest
import torch
from support.decoders import EXPERTS, GATES, HEAD_VECTORS, chosen, padded
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM, byte_tokenizer, without_positions

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB, LENGTH, STEPS, LAYERS = 257, 24, 20, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def make_llama(**fields):
    torch.manual_seed(1)
    config = without_positions(LlamaConfig(**SIZES | fields))
    return AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking")


def make_stick_breaking_model(**fields):
    torch.manual_seed(1)
    return StickBreakingForCausalLM(StickBreakingConfig(**SIZES | fields))


MODELS = {
    "llama": make_llama,
    "stickbreaking": partial(make_stick_breaking_model, **HEAD_VECTORS, logits_scaling=0.5),
    "gates, experts": partial(make_stick_breaking_model, **GATES, **EXPERTS),
}
each_model = pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)


def make_examples(count):
    """Return rows of bytes, each the next one plus 1 from a random start, which a model learns fast."""
    starts = torch.randint(0, 200, (count, 1), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in starts + torch.arange(LENGTH)]


def arguments(folder, **options):
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def count_forwards(model):
    """Return a list that each forward of an attention layer appends to."""
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(0))
    return calls


class Gradients(TrainerCallback):
    """Keep the gradients of each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})


def train(model, folder, **options):
    """Train with the Trainer and return the losses, the gradients by step, and the forwards of attention layers."""
    calls, gradients = count_forwards(model), Gradients()
    options = arguments(folder, **options)
    trainer = Trainer(
        model, TrainingArguments(**options), train_dataset=make_examples(4 * STEPS), callbacks=[gradients]
    )
    trainer.train()
    return losses_of(trainer), gradients.steps, len(calls)


@each_model
def test_label_smoothing_shifts_the_labels(make_model, tmp_path):
    """Trainer computes this loss itself, from the logits. With almost no smoothing it is that of the model."""
    model, row = make_model(), make_examples(1)[0]
    trainer = Trainer(model, TrainingArguments(**arguments(tmp_path, label_smoothing_factor=1e-9)))
    batch = default_data_collator([row])
    expected = model(**batch).loss
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected)


@each_model
@pytest.mark.parametrize("reentrant", [False, True], ids=["default", "reentrant"])
def test_trainer_with_gradient_checkpointing(make_model, reentrant, tmp_path):
    """Losses and gradients of all steps are the same bits as without, and the backward computes each layer again."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    losses, gradients, forwards = train(make_model(), tmp_path)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    found_losses, found_gradients, found_forwards = train(make_model(), tmp_path, **options)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1
    assert (forwards, found_forwards) == (STEPS * LAYERS, 2 * STEPS * LAYERS)
    assert found_losses == losses
    for step, (found, expected) in enumerate(zip(found_gradients, gradients, strict=True)):
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            assert torch.equal(found[name], gradient), f"{name}, step {step + 1}"


MASKED = [
    {"attention_mask": [0, 0, 0, 1, 1, 1, 1, 1], "labels": [-100] * 3 + [5, 6, 7, 8, 9]},
    {"attention_mask": [1] * 8, "labels": [1, 2, 3, 4, 5, 6, 7, 8]},
]
PACKED = [{"position_ids": [0, 1, 2, 3, 0, 1, 2, 3], "labels": list(range(first, first + 8))} for first in (3, 40)]
BALANCED = {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("fields", [HEAD_VECTORS, BALANCED], ids=["head vectors", "experts"])
@pytest.mark.parametrize(("column", "rows"), [("attention_mask", MASKED), ("position_ids", PACKED)])
def test_trainer_keeps_columns(column, rows, fields, tmp_path):
    """The Trainer drops columns that no argument of the model is named after. It evaluates the loss of the labels."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    model = make_stick_breaking_model(**fields, initializer_range=0.3)
    data = datasets.Dataset.from_list(
        [{**row, "input_ids": [max(label, 0) for label in row["labels"]]} for row in rows]
    )
    options = {"train_dataset": data, "eval_dataset": data, "data_collator": default_data_collator}
    trainer = Trainer(model, TrainingArguments(**arguments(tmp_path)), **options)
    assert trainer.label_names == ["labels"]
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch.keys() == {"input_ids", "labels", column}
    whole = {name: torch.tensor(data[name]) for name in batch}
    expected = model(**whole).loss
    torch.testing.assert_close(trainer.compute_loss(model, batch), expected, atol=1e-5, rtol=1e-5)
    found = trainer.evaluate()["eval_loss"]
    torch.testing.assert_close(torch.tensor(found), expected.detach(), atol=1e-5, rtol=1e-5)
    del whole[column]
    assert (model(**whole).loss - expected).abs() > 1e-3


@each_model
def test_prompt_tuning_generates(make_model):
    """Without a cache: with a cache, PEFT 0.21 inserts its virtual tokens in every step (transformers 5.24)."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(make_model(initializer_range=0.3), config).eval()
    rows = [torch.arange(5, 14)[None], torch.arange(30, 34)[None]]
    ids, mask = padded(rows)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "use_cache": False}
    found = model.generate(input_ids=ids, attention_mask=mask, **options)[:, -4:]
    for row, new in zip(rows, found.tolist(), strict=True):
        alone = model.generate(input_ids=row, **options)[0, -4:]
        assert new == alone.tolist() == chosen(model, row, 4)


@each_model
def test_adapters_of_every_linear_layer(make_model):
    """Adapters of routers and gates take part in the forward, and merging them changes no logits."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    model = peft.get_peft_model(make_model(initializer_range=0.3), config).eval()
    ids = torch.arange(5, 29).view(2, 12)
    adapted = model(ids, labels=ids, use_cache=False)
    adapted.loss.backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None and gradient.any() for gradient in trained.values())
    merged = model.merge_and_unload()(ids, use_cache=False).logits
    torch.testing.assert_close(merged, adapted.logits, atol=1e-3, rtol=1e-3)


@each_model
def test_weights_that_accelerate_offloads(make_model):
    """Each module gets its weights only when it is called."""
    from accelerate import cpu_offload

    model, ids = make_model(initializer_range=0.3).eval(), torch.arange(5, 29).view(2, 12)
    expected = model(ids, use_cache=False).logits
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    torch.testing.assert_close(offloaded(ids, use_cache=False).logits, expected)


class Loop:
    """A training loop with accelerate: `accumulated` batches of `rows` rows in each update of the weights."""

    def __init__(self, make_model, rows, accumulated):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
        model = make_model()
        torch.manual_seed(3)  # for the order of rows
        loader = torch.utils.data.DataLoader(make_examples(2 * STEPS), rows, shuffle=True)  # an epoch has 10 updates
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)  # Adam would hide the gradients' scale
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def epoch(self):
        """Train on each row once and return the mean loss of each update."""
        losses, micro_losses = [], []
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            micro_losses.append(loss.item())
            if self.accelerator.sync_gradients:
                losses.append(sum(micro_losses) / len(micro_losses))
                micro_losses = []
        return losses


@each_model
def test_accelerate(make_model, tmp_path):
    """20 steps with accumulated gradients. Saved after 10 of them, a new loop continues with the same losses."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    loop = Loop(make_model, rows=2, accumulated=2)
    losses = loop.epoch()
    loop.accelerator.save_state(str(tmp_path))
    losses += loop.epoch()
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1

    resumed = Loop(make_model, rows=2, accumulated=2)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.epoch() == losses[STEPS // 2 :]

    at_once = Loop(make_model, rows=4, accumulated=1)
    torch.testing.assert_close(at_once.epoch(), losses[: STEPS // 2], atol=1e-3, rtol=0)


TEXTS = [f"{name} is {age} years old. " * (1 + age % 3) for age in range(20, 52) for name in ("Ann", "Robert")]


def make_sft_trainer(model, folder, **options):
    pytest.importorskip("datasets", reason="needs datasets")
    trl = pytest.importorskip("trl", reason="needs trl")
    from datasets import Dataset

    options = arguments(folder, per_device_train_batch_size=2, bf16=False, packing=True, max_length=160, **options)
    documents = Dataset.from_dict({"text": TEXTS})
    return trl.SFTTrainer(model, trl.SFTConfig(**options), train_dataset=documents, processing_class=byte_tokenizer())


@each_model
def test_trl_trains_on_packed_documents(make_model, tmp_path):
    """With gradient checkpointing, which is TRL's default."""
    trainer = make_sft_trainer(make_model(), tmp_path)
    assert trainer.args.packing_strategy == "bfd" and trainer.args.gradient_checkpointing
    trainer.train()
    losses = losses_of(trainer)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1


def loss_of_documents(model, batch):
    """Return the mean loss of the tokens of a packed batch, with a forward for each document."""
    documents = batch["input_ids"][0].split(batch["cu_seq_lens_q"].diff().tolist())
    total = sum(model(row[None], labels=row[None], num_items_in_batch=1).loss for row in documents)
    return total / sum(len(row) - 1 for row in documents)


def loss_and_gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@each_model
@pytest.mark.parametrize("given_by", ["bounds and positions", "positions"])
def test_packed_documents_of_trl_do_not_see_each_other(make_model, given_by, tmp_path):
    """A packed batch has the loss and the gradients of its documents alone. Weights are large, so documents matter.

    The load-balancing loss of experts is off: the one of a batch is no mean of those of its documents.
    """
    trainer = make_sft_trainer(make_model(initializer_range=0.3), tmp_path, router_aux_loss_coef=0.0)
    model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
    assert "attention_mask" not in batch and len(batch["cu_seq_lens_q"]) > 5
    wanted, gradients = loss_and_gradients(loss_of_documents(model, batch), model)
    if given_by == "positions":
        batch = {name: value for name, value in batch.items() if not name.startswith(("cu_seq_lens", "max_length"))}
    found, found_gradients = loss_and_gradients(trainer.compute_loss(model, dict(batch)), model)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_gradients, gradients, atol=1e-4, rtol=1e-3)
    batch = {name: batch[name] for name in ("input_ids", "labels")}
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
    assert (trainer.compute_loss(model, batch) - wanted).abs() > 1e-2
