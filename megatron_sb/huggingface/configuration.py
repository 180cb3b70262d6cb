"""The configuration of `StickBreakingForCausalLM`."""

from __future__ import annotations

from transformers import PreTrainedConfig

from megatron_sb.options import DEFAULT_MASS_THRESHOLD


class StickBreakingConfig(PreTrainedConfig):
    """Sizes and options of a decoder with stick-breaking attention, RMSNorm and gated MLPs (SwiGLU), without positions.

    vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads: as everywhere.
    num_key_value_heads, head_dim: by default num_attention_heads, and hidden_size / num_attention_heads.
    attend_current, mass_threshold: as in `megatron_sb.stickbreaking_attention`.
    remainder_bias, head_norm: what is left of a stick carries a vector per head (paper eq. 14), and the output of each
        head is normalised behind that (`megatron_sb.head_output`), with head_norm_eps.
    num_experts, num_experts_per_tok: a mixture of experts in place of every MLP, each of intermediate_size; a token's
        experts are weighed by the softmax of their logits. None: no experts.
    attention_multiplier: the scale of the logits of the attention; 1 / sqrt(head_dim) where it is None.
    embedding_multiplier, residual_multiplier, logits_scaling: embeddings and what each half of a layer adds are
        multiplied by these, the model's logits divided by the last.
    max_position_embeddings: the longest context in training; nothing depends on it.
    """

    model_type = "stick_breaking"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attend_current: bool = False
    mass_threshold: float = DEFAULT_MASS_THRESHOLD
    remainder_bias: bool = False
    head_norm: bool = False
    head_norm_eps: float = 1e-5
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    attention_multiplier: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    max_position_embeddings: int = 65536
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size = {self.hidden_size} is no multiple of num_attention_heads = "
                    f"{self.num_attention_heads}: give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads = {self.num_key_value_heads}; a divisor of num_attention_heads = "
                f"{self.num_attention_heads} is allowed"
            )
        if (self.num_experts is None) != (self.num_experts_per_tok is None) or (
            self.num_experts is not None and not 1 <= self.num_experts_per_tok <= self.num_experts
        ):
            raise ValueError(
                f"num_experts_per_tok = {self.num_experts_per_tok}; 1 to num_experts = {self.num_experts} is allowed, "
                "or None for both"
            )
        super().__post_init__(**kwargs)
