"""What a transformers model computes from given inputs. This module does not import megatron_sb."""

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

NEW_TOKENS = 6


def make_inputs(vocab_size: int) -> dict[str, Tensor]:
    """Return the inputs of `computed`: ids and padded ids (2, 12), mask of the padding, positions of two documents."""
    ids, mask = torch.randint(1, vocab_size, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None].expand(2, -1)
    return {"ids": ids, "mask": mask, "padded": ids * mask, "positions": positions}


def computed(model: torch.nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return logits, loss and gradients, and the tokens and logits of decoding, by name."""
    ids, mask, padded = inputs["ids"], inputs["mask"], inputs["padded"]
    model.train()
    made = model(ids, labels=ids, position_ids=inputs["positions"], use_cache=False)
    made.loss.backward()
    results = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    results |= {"packed logits": made.logits.detach(), "loss": made.loss.detach()}
    model.eval().requires_grad_(False)
    results["logits"] = model(ids, use_cache=False).logits
    results["logits with right padding"] = model(padded.flip(1), attention_mask=mask.flip(1)).logits
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    for kind in ("dynamic", "static"):
        results[f"tokens, {kind} cache"] = model.generate(
            padded, attention_mask=mask, cache_implementation=kind, **options
        )
        for side, kept in (("no", None), ("left", mask)):
            cache = DynamicCache() if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
            parts = [
                model(
                    padded[:, begin:end],
                    attention_mask=None if kept is None else kept[:, :end],
                    past_key_values=cache,
                ).logits
                for begin, end in ((0, 7), (7, 10), (10, 11), (11, 12))
            ]
            results[f"logits with {side} padding, {kind} cache"] = torch.cat(parts, 1)
    return results
