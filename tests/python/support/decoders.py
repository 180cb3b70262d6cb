"""Small models of transformers."""

import torch

from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM


def make_model(dtype: torch.dtype = torch.float32, **fields: object) -> StickBreakingForCausalLM:
    """A model of these fields; its vectors are not the 0 and 1 of the start, which would hide what they do."""
    torch.manual_seed(1)
    model = StickBreakingForCausalLM(StickBreakingConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)
