"""Modules that stand in for those that need a GPU or Transformer Engine: Mamba, gated delta nets, latent attention."""

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention


class MeanMixer(torch.nn.Module):
    """A linear layer of the mean of the hidden states so far, with the interface of a mixer of Megatron-Core."""

    def __init__(self, config: TransformerConfig, **unused):
        super().__init__()
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size, bias=False, dtype=config.params_dtype)

    def forward(self, hidden_states: torch.Tensor, *unused, **also_unused) -> tuple[torch.Tensor, None]:
        """Mix hidden states (s, b, h)."""
        counts = torch.arange(1, len(hidden_states) + 1, device=hidden_states.device)[:, None, None]
        return self.linear((hidden_states.float().cumsum(0) / counts).to(hidden_states.dtype)), None


class LatentCoreAttention(DotProductAttention):
    """Megatron's softmax attention as the core of latent attention. Keys and values have config.kv_channels channels.

    Latent attention builds a core twice, and names the numbers of channels only the second time.
    """

    def __init__(self, *args, k_channels: int | None = None, v_channels: int | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        assert {k_channels, v_channels} <= {None, self.config.kv_channels}
