"""Small transformers models of this package."""

import torch
from torch import Tensor

from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
from megatron_sb.nn.gates import OPEN_GATE

# Fields of the models that tests convert between formats, and the additional fields of some of them.
TO_CONVERT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
HEAD_VECTORS = {"remainder_bias": True, "head_norm": True}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2}
GATES = {"forget_gate": True}
BIASES = {"qkv_bias": True}
EUCLIDEAN = {"logits": "euclidean", "attention_multiplier": 0.05}  # With larger logits, queries attend to nothing.


def make_model(dtype: torch.dtype = torch.float32, **fields: object) -> StickBreakingForCausalLM:
    """Return a model with these fields of the configuration.

    Its biases and norm weights are random. Their initial values, 0 and 1, would hide an error in their use. Forget
    gates are half open, because open ones would hide an error, too.
    """
    torch.manual_seed(1)
    model = StickBreakingForCausalLM(StickBreakingConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            if name.endswith("self_attn.gate_proj.bias"):
                parameter -= OPEN_GATE
    return model.to(dtype)


def padded(rows: list[Tensor], side: str = "left") -> tuple[Tensor, Tensor]:
    """Return rows of tokens (1, n) as a batch (b, longest), padded with 0 on one side, and its attention mask."""
    width = max(row.shape[1] for row in rows)
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    for index, row in enumerate(rows):
        n = row.shape[1]
        kept = slice(width - n, width) if side == "left" else slice(0, n)
        ids[index, kept], mask[index, kept] = row[0], 1
    return ids, mask


def chosen(model: torch.nn.Module, row: Tensor, steps: int) -> list[int]:
    """Return the tokens that greedy generation appends to a row (1, n). Each step is a forward without a cache."""
    for _ in range(steps):
        with torch.no_grad():
            logits = model(row, use_cache=False).logits
        row = torch.cat([row, logits[:, -1:].argmax(-1)], 1)
    return row[0, -steps:].tolist()
