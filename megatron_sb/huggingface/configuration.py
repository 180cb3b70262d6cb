"""The configuration of `StickBreakingForCausalLM`."""

from __future__ import annotations

import math
from typing import ClassVar

from transformers import PreTrainedConfig

from megatron_sb.huggingface.operators import stored_head_dim
from megatron_sb.options import LayerOptions, check_head_dim
from megatron_sb.validation import (
    check_counts,
    check_finite,
    check_flag,
    check_integer,
    check_number,
    head_dim_of,
    python_number,
)


class StickBreakingConfig(PreTrainedConfig):
    """Configure a decoder with stick-breaking attention, RMSNorm and gated MLPs (SwiGLU), without positions.

    Args:
        vocab_size: number of tokens. Default 32000.
        hidden_size: channels between layers. Default 1024.
        intermediate_size: width of an MLP, or of each expert. Default 2816.
        num_hidden_layers: number of layers. Default 24.
        num_attention_heads: number of query heads. Default 16.
        num_key_value_heads: number of KV heads. Default None: num_attention_heads.
        head_dim: channels of a head, a multiple of 8 and at most 256, with Euclidean logits at most 248. Default None:
            hidden_size / num_attention_heads.
        attend_current: whether a query attends to its own key. Default False.
        mass_threshold: older keys are skipped once the mass is below this; 0 disables skipping. Default 2**-24.
        logits: "dot" or "euclidean", see `megatron_sb.options.AttentionOptions`. Default "dot".
        reach: reach of the first and of the last head, see `megatron_sb.options.AttentionOptions`. Default None.
        forget_gate: multiply the beta of each key by a gate, sigmoid(gate_proj(x)) for each KV head. The auxiliary loss
            that `megatron-sb train` can add for gates (`forget_gate_loss`) is not part of this model. Default False.
        remainder_bias: add the mass, times a learnable vector for each head, to the output (paper eq. 14). Default
            False.
        head_norm: normalise the output of each head (`megatron_sb.head_output`). Default False.
        head_norm_eps: epsilon of that norm. Default 1e-5.
        qkv_bias: give the projections to queries, keys and values a bias, which starts at 0. Default False.
        num_experts: replace every MLP by a mixture of this many experts. Default None: no experts.
        num_experts_per_tok: experts of a token, weighted by the softmax of their logits. Default None.
        output_router_logits: return the router logits and the load-balancing loss of the experts, and add that loss to
            the loss of the labels. Default False.
        router_aux_loss_coef: factor of the load-balancing loss in the loss. Default None: 0.001 with experts, and 0
            without.
        attention_multiplier: scale of the attention's logits. Default None: 1 / sqrt(head_dim), and 1 for Euclidean
            logits.
        embedding_multiplier: factor of the embeddings. Default 1.
        residual_multiplier: factor of what the attention and the MLP add to the residual stream. Default 1.
        logits_scaling: divisor of the model's logits. Default 1.
        rms_norm_eps: epsilon of the RMSNorms. Default 1e-5.
        initializer_range: standard deviation of initial weights. Default 0.02.
        tie_word_embeddings: share the embedding with the output layer. Default False.
        use_cache: whether forwards return a cache of keys and values. Default True.
        max_position_embeddings: longest context in training, for information only. Default 65536.
        pad_token_id, bos_token_id, eos_token_id: special tokens. Default None.

    Raises:
        TypeError: if an option of the attention, a multiplier, an epsilon, qkv_bias, pad_token_id, output_router_logits
            or router_aux_loss_coef has a wrong type.
        ValueError: if a size or a number of experts is not an int of at least 1, an option of the attention is out of
            range (see `megatron_sb.options.LayerOptions`), head_dim is not supported, sizes are not divisible as
            required, num_experts_per_tok is not in [1, num_experts], a multiplier is not finite, logits_scaling is 0,
            an epsilon or router_aux_loss_coef is negative or infinite, head_norm_eps is below 1e-30 with head_norm, or
            one of the two options of the router is set without experts.

    Example:
        >>> from megatron_sb.huggingface import StickBreakingConfig
        >>> StickBreakingConfig(hidden_size=256, num_attention_heads=4).head_dim
        64
    """

    model_type = "stick_breaking"
    # A list, because Trainer.evaluate() adds a list to it.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values", "aux_loss", "router_logits"]

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attend_current: bool = LayerOptions.attend_current
    mass_threshold: float = LayerOptions.mass_threshold
    logits: str = LayerOptions.logits
    reach: list[float] | tuple[float, float] | None = LayerOptions.reach
    forget_gate: bool = LayerOptions.forget_gate
    remainder_bias: bool = LayerOptions.remainder_bias
    head_norm: bool = LayerOptions.head_norm
    head_norm_eps: float = 1e-5
    qkv_bias: bool = False
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float | None = None
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
        for name, value in list(vars(self).items()):  # JSON has no numbers of numpy
            is_series = isinstance(value, (list, tuple))
            setattr(self, name, type(value)(map(python_number, value)) if is_series else python_number(value))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        heads = self.num_attention_heads
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        check_counts({name: getattr(self, name) for name in (*names, "num_key_value_heads")})
        self.head_dim = head_dim_of(self.hidden_size, heads, self.head_dim, "num_attention_heads")
        check_counts({"head_dim": self.head_dim})
        self._check_numbers()
        LayerOptions(
            scale=self.attention_multiplier,
            attend_current=self.attend_current,
            mass_threshold=self.mass_threshold,
            logits=self.logits,
            reach=self.reach,
            forget_gate=self.forget_gate,
            remainder_bias=self.remainder_bias,
            head_norm=self.head_norm,
        )  # this validates the options
        check_head_dim("head_dim", self.head_dim, extra_columns=self.logits == "euclidean")
        check_flag("qkv_bias", self.qkv_bias)
        if self.pad_token_id is not None:  # torch's error, when the model is built, would not name it
            check_integer("pad_token_id", self.pad_token_id)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads, {self.num_attention_heads}, got "
                f"{self.num_key_value_heads}."
            )
        experts = {name: getattr(self, name) for name in ("num_experts", "num_experts_per_tok")}
        check_counts({name: number for name, number in experts.items() if number is not None})
        if (self.num_experts is None) != (self.num_experts_per_tok is None) or (
            self.num_experts is not None and self.num_experts_per_tok > self.num_experts
        ):
            raise ValueError(
                f"num_experts_per_tok must be in [1, num_experts], or None if num_experts is None, got "
                f"{self.num_experts_per_tok} with num_experts={self.num_experts}."
            )
        self._resolve_router_options()
        super().__post_init__(**kwargs)

    def _check_numbers(self) -> None:
        """Validate the multipliers and the epsilons."""
        if self.attention_multiplier is not None:
            check_finite("attention_multiplier", self.attention_multiplier)
        for name in ("embedding_multiplier", "residual_multiplier"):
            check_finite(name, getattr(self, name))
        check_number(
            "logits_scaling", self.logits_scaling, "a finite number other than 0", lambda x: 0 < abs(x) < math.inf
        )
        # `head_output` rejects smaller numbers, when the model is called.
        least_of_head = 1e-30 if self.head_norm is True else 0
        for name, least in (("rms_norm_eps", 0), ("head_norm_eps", least_of_head)):
            expected, fits = f"a finite number of at least {least}", lambda x, least=least: least <= x < math.inf
            check_number(name, getattr(self, name), expected, fits)

    def _resolve_router_options(self) -> None:
        """Set the default of router_aux_loss_coef, and validate the options of the router."""
        if self.router_aux_loss_coef is None:
            # 0 is for TRL, which requests the loss wherever the coefficient is another value.
            self.router_aux_loss_coef = 0.001 if self.num_experts else 0.0
        check_flag("output_router_logits", self.output_router_logits)
        expected, fits = "a finite number of at least 0", lambda x: 0 <= x < math.inf
        check_number("router_aux_loss_coef", self.router_aux_loss_coef, expected, fits)
        if self.num_experts is None and self.output_router_logits:
            raise ValueError("output_router_logits must be False if num_experts is None, got True.")
        if self.num_experts is None and self.router_aux_loss_coef:
            raise ValueError(
                f"router_aux_loss_coef must be 0 or None if num_experts is None, got {self.router_aux_loss_coef}."
            )

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing. `save_pretrained` of the models writes the code of this class itself."""

    @property
    def qk_head_dim(self) -> int | None:
        """Width of the keys in a cache, or None if it is head_dim.

        transformers reads this field, and allocates a static cache with keys of head_dim before the first keys are
        there only if it is None.
        """
        width = stored_head_dim(self.head_dim, logits=self.logits, forget_gate=self.forget_gate)
        return None if width == self.head_dim else width
