"""The decoder that `megatron-sb train` trains, as a transformers model. Its weights have the names of transformers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import HfApi, ModelCard
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, cache_utils
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import can_return_tuple

from megatron_sb.huggingface.attention import NAME, attend, check_keeps_keys
from megatron_sb.huggingface.configuration import StickBreakingConfig
from megatron_sb.huggingface.operators import head_output, shared_plan, stored_keys
from megatron_sb.huggingface.packing import check_position_shape, of_step_mask, with_documents
from megatron_sb.huggingface.saved_folder import AUTO_CLASSES, LOADER, write_card, write_code
from megatron_sb.nn.gates import OPEN_GATE, gates_of
from megatron_sb.options import reach_of_heads
from megatron_sb.validation import check_optional_tensors

# The field of outputs that holds the cache. transformers 5.24 renamed it, and the argument of the same name.
CACHE_FIELD = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"

# Layers of quantized caches. transformers before 5.24 has no common base class.
_QUANTIZED = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


class StickBreakingGateProjection(nn.Linear):
    """Compute the logit of a forget gate for each KV head. `_init_weights` finds it by its class, and opens the gates.

    Tools that replace linear layers may replace it, so it must not compute anything else.
    """


class StickBreakingAttention(nn.Module):
    """Stick-breaking self-attention, optionally with forget gates, remainder bias and head norm."""

    def __init__(self, config: StickBreakingConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        width, kv_width = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        gates = (config.hidden_size, config.num_key_value_heads)
        self.gate_proj = StickBreakingGateProjection(*gates) if config.forget_gate else None
        head_vectors = {
            "remainder_bias": config.remainder_bias,
            "norm_weight": config.head_norm,
            "norm_bias": config.head_norm,
        }
        for name, enabled in head_vectors.items():
            self.register_parameter(name, nn.Parameter(torch.empty(width)) if enabled else None)

    def forward(self, x: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """x: (b, s, hidden_size); mask: as `attention_mask` returns it."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        config, with_mass = self.config, self.remainder_bias is not None
        gates = None if self.gate_proj is None else gates_of(self.gate_proj(x))
        if cache is not None:
            k = stored_keys(k, logits=config.logits, forget_gate=gates)
            k, v = cache.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx)
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        options = {
            "logits": config.logits,
            "forget_gate": gates if cache is None else config.forget_gate,
            "scale": config.attention_multiplier,
            "attend_current": config.attend_current,
            "mass_threshold": config.mass_threshold,
            "reach": self._reach_of(q.shape[2]),
        }
        result = attend(q, k, v, mask, return_mass=with_mass, **options)
        o, mass = result if with_mass else (result, None)
        if with_mass or self.norm_weight is not None:
            vectors = (self.remainder_bias, self.norm_weight, self.norm_bias)
            o = head_output(o, mass, *vectors, eps=config.head_norm_eps)
        return self.o_proj(o.flatten(2))

    def _reach_of(self, num_heads: int) -> tuple[float, float] | None:
        """Return the reach of this rank's heads. With tensor parallelism these are not all heads."""
        reach, all_heads = self.config.reach, self.config.num_attention_heads
        if reach is None or num_heads == all_heads:
            return reach
        placements = getattr(self.q_proj.weight, "placements", None)  # of a DTensor
        if placements is None:
            raise ValueError(
                f"reach must be None, got {tuple(reach)}: q_proj returns {num_heads} of {all_heads} heads, and its "
                "weight is not a DTensor, which would say which ones. Use torch's parallelize_module."
            )
        mesh, index = self.q_proj.weight.device_mesh, 0
        for size, coordinate, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
            index = index * size + coordinate if placement.is_shard(0) else index
        return reach_of_heads(reach, all_heads, index * num_heads, (index + 1) * num_heads)


class StickBreakingMLP(nn.Module):
    """Compute down(silu(gate(x)) * up(x))."""

    def __init__(self, config: StickBreakingConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (.., hidden_size)."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class StickBreakingRouter(nn.Linear):
    """Compute the router logits of tokens in fp32, also under autocast.

    Only this module reads its weight. Programs that adapt linear layers, or keep their weights elsewhere until they are
    called (PEFT, accelerate), would be ignored otherwise.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden_size). Returns (tokens, num_experts)."""
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.float(), self.weight.float())


class StickBreakingExperts(nn.Module):
    """A mixture of MLPs. A token's best experts are weighted by the softmax of their router logits, in fp32."""

    def __init__(self, config: StickBreakingConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.router = StickBreakingRouter(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(StickBreakingMLP(config) for _ in range(config.num_experts))

    def forward(self, x: Tensor, return_router_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """x: (b, s, hidden_size). The router logits have the shape (b * s, num_experts)."""
        tokens = x.flatten(0, -2)
        logits = self.router(tokens)
        best, chosen = logits.topk(self.num_chosen, dim=-1)
        weights = best.softmax(-1)
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            expert_out = self.experts[expert](tokens[rows])
            out.index_add_(0, rows, expert_out.float() * weights[rows, places, None])
        out = out.to(x.dtype).view_as(x)
        return (out, logits) if return_router_logits else out


class StickBreakingDecoderLayer(GradientCheckpointingLayer):
    """Compute x + attention(norm(x)), then the same with the MLP or the experts."""

    def __init__(self, config: StickBreakingConfig, layer_idx: int) -> None:
        super().__init__()
        self.residual_multiplier = config.residual_multiplier
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = StickBreakingAttention(config, layer_idx)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = StickBreakingExperts(config) if config.num_experts else StickBreakingMLP(config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        output_router_logits: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: (b, s, hidden_size). With output_router_logits, also return the router logits (b * s, num_experts)."""
        x = x + self.residual_multiplier * self.self_attn(self.input_layernorm(x), mask, cache)
        normed = self.post_attention_layernorm(x)
        if not output_router_logits:
            return x + self.residual_multiplier * self.mlp(normed)
        # Returned, and not kept by a hook: reentrant checkpointing gives gradients only to what a layer returns.
        out, router_logits = self.mlp(normed, return_router_logits=True)
        return x + self.residual_multiplier * out, router_logits


class StickBreakingPreTrainedModel(PreTrainedModel):
    """Shared part of both models."""

    config_class = StickBreakingConfig
    config: StickBreakingConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("StickBreakingDecoderLayer",)
    _skip_keys_device_placement = ("cache", "past_key_values")
    _supports_attention_backend = True

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing. `save_pretrained` writes the code of this class itself."""

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the model as transformers does, with code that runs it.

        Programs that do not import megatron_sb load the model through that code, with trust_remote_code=True. Where
        megatron_sb is not installed, the code runs the model in pure torch.

        Raises:
            ValueError: for push_to_hub=True, which would upload before the code is written. Use the method
                `push_to_hub` instead.
        """
        if kwargs.get("push_to_hub"):
            raise ValueError("push_to_hub must be False, got True. Call model.push_to_hub(REPOSITORY) instead.")
        self.config.auto_map = {auto: f"{LOADER}.{name}" for auto, name in AUTO_CLASSES.items()}
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_code(Path(save_directory))

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Return "stickbreaking". Raise ValueError if another attention is requested."""
        if requested_attention not in (None, NAME):
            raise ValueError(f"attn_implementation must be {NAME!r} for this model, got {requested_attention!r}.")
        return NAME

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, StickBreakingAttention):
            initial = {"remainder_bias": 0.0, "norm_weight": 1.0, "norm_bias": 0.0}
            for name, value in initial.items():
                if getattr(module, name) is not None:
                    nn.init.constant_(getattr(module, name), value)
        # transformers does not call this for the attention of a layer, if that has no parameters of its own.
        if isinstance(module, StickBreakingGateProjection):
            nn.init.constant_(module.bias, OPEN_GATE)


def _wants_router_logits(config: StickBreakingConfig, output_router_logits: bool | None) -> bool:
    """Return output_router_logits, or its default. Raise ValueError if it is True and the model has no experts."""
    wanted = config.output_router_logits if output_router_logits is None else output_router_logits
    if wanted and not config.num_experts:
        raise ValueError(
            "output_router_logits must be False for a model without experts (num_experts is None), got True. Training "
            "programs set it if their coefficient of the load-balancing loss (router_aux_loss_coef) is not 0."
        )
    return bool(wanted)


def _check_labels(
    labels: Tensor | None, shift_labels: Tensor | None, x: Tensor | None, logits_to_keep: int | Tensor
) -> None:
    """Raise ValueError if labels do not fit x, input_ids or inputs_embeds, or would be shifted among a rank's rows."""
    given = {"labels": labels, "shift_labels": shift_labels}
    check_optional_tensors(given)
    for name, value in given.items():
        # The loss flattens them, so that another shape of the same size would give a loss of other tokens.
        if value is not None and isinstance(x, Tensor) and isinstance(logits_to_keep, int):
            shape = (x.shape[0], min(logits_to_keep, x.shape[1]) if logits_to_keep else x.shape[1])
            if value.shape != shape:
                raise ValueError(
                    f"{name} must have the shape of the logits' tokens, {shape}, got {tuple(value.shape)}."
                )
    if labels is not None and shift_labels is None and shared_plan() is not None:
        raise ValueError(
            "labels must be None in shared_sequence, because the next token of a row can be on another rank, got a "
            "tensor. Shift the labels of the whole sequence, share them, and pass them as shift_labels."
        )


def _load_balancing_loss(config: StickBreakingConfig, outputs: MoeModelOutputWithPast, mask: Tensor | None) -> Tensor:
    """Return transformers' load-balancing loss, over the tokens of all layers that are not padding.

    Args:
        config: of the model.
        outputs: of the model, with router logits.
        mask: the attention mask (b or 1, keys so far), 0 for padding, or a `step_mask`. None: no padding.
    """
    step = None if mask is None else of_step_mask(mask)
    if step is not None:
        first_key, num_keys = step
        mask = (first_key < num_keys)[:, None]
    elif mask is not None:
        length, cache = outputs.last_hidden_state.shape[1], getattr(outputs, CACHE_FIELD)
        end = length if cache is None else int(cache.get_seq_length())  # columns before end - length are older keys
        mask = (mask[:, end - length : end] != 0).expand(len(outputs.last_hidden_state), -1)
    return load_balancing_loss_func(outputs.router_logits, config.num_experts, config.num_experts_per_tok, mask)


def _given_cache(model: StickBreakingModel, cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """Return the cache of older keys, which has two names. Raise TypeError or ValueError if it cannot be used."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError(
            "past_key_values must be None if cache is given, got another cache. Both names are for the same cache. "
            "PEFT's prefix tuning passes two caches with transformers 5.24 or later."
        )
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"cache must be a Cache of transformers, such as DynamicCache, got {type(cache).__name__}.")
    has_columns = cache is not None and model.config.qk_head_dim is not None
    if has_columns and any(isinstance(layer, _QUANTIZED) for layer in getattr(cache, "layers", ())):
        raise ValueError(
            f"cache must not be quantized with forget_gate or Euclidean logits, got {type(cache).__name__}: they add "
            "columns to the keys that need full precision."
        )
    # The backward would compute the layers again.
    if cache is not None and model.gradient_checkpointing and model.training and torch.is_grad_enabled():
        raise ValueError(
            f"cache must be None with gradient checkpointing, got {type(cache).__name__}: the backward would append "
            "its keys a second time. Call model.gradient_checkpointing_disable(), or use torch.no_grad()."
        )
    return cache


class StickBreakingModel(StickBreakingPreTrainedModel):
    """The decoder without its output layer.

    Args:
        config: sizes and options.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface import StickBreakingConfig, StickBreakingModel
        >>> model = StickBreakingModel(StickBreakingConfig(vocab_size=257, hidden_size=128, num_hidden_layers=2))
        >>> model(torch.arange(8)[None]).last_hidden_state.shape
        torch.Size([1, 8, 128])
    """

    def __init__(self, config: StickBreakingConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (StickBreakingDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def _embedded(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return the input of the first layer, (b, s, hidden_size). Raise ValueError for wrong arguments."""
        if (input_ids is None) == (inputs_embeds is None):
            both = "both" if inputs_embeds is not None else "neither"
            raise ValueError(f"Exactly one of input_ids and inputs_embeds must be given, got {both}.")
        if input_ids is not None and input_ids.dim() != 2:
            raise ValueError(f"input_ids must have 2 dimensions, (batch, tokens), got shape {tuple(input_ids.shape)}.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dim() != 3 or x.shape[2] != self.config.hidden_size:
            raise ValueError(
                f"inputs_embeds must have shape (batch, tokens, {self.config.hidden_size}), got {tuple(x.shape)}."
            )
        return x * self.config.embedding_multiplier

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        """Compute hidden states.

        Packed documents are given by position_ids or by cu_seq_lens_q. Both are used only without older keys in the
        cache and without padding in attention_mask.

        Args:
            input_ids: (b, s). Exactly one of input_ids and inputs_embeds is required.
            attention_mask: (b or 1, keys so far), 0 for padding. Default None: no padding.
            position_ids: (b, s), used only to find document boundaries (where they restart at 0).
            cache: a cache of older keys and values. Not valid in training with gradient checkpointing.
            past_key_values: the same, under its name before transformers 5.24.
            inputs_embeds: (b, s, hidden_size).
            use_cache: return a cache. Default None: config.use_cache.
            output_hidden_states: return the input of each layer and the output. Default None:
                config.output_hidden_states.
            output_attentions: must be False. Default None: config.output_attentions.
            cu_seq_lens_q: int32 (documents + 1,), offsets of the documents of a single row.
            output_router_logits: return the router logits of each layer. Default None: config.output_router_logits.
            kwargs: ignored.

        Returns:
            last_hidden_state (b, s, hidden_size), the cache and hidden_states. With output_router_logits also
            router_logits, fp32 (b * s, num_experts) for each layer.

        Raises:
            TypeError, ValueError: if an argument is not supported.
        """
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError("output_attentions must be False, got True: attention weights are never stored.")
        check_optional_tensors(
            {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
        )
        check_optional_tensors({"position_ids": position_ids, "cu_seq_lens_q": cu_seq_lens_q})
        x = self._embedded(input_ids, inputs_embeds)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = _given_cache(self, cache, past_key_values)
        if use_cache and cache is None and not self.training:
            cache = DynamicCache(config=self.config)
        check_keeps_keys(cache)
        is_of_rows = attention_mask is not None and attention_mask.shape == x.shape[:2]
        # Documents of position_ids count if the mask has no padding. A graph does not read its values, so it breaks.
        reads_values = position_ids is not None and is_of_rows
        make_mask = torch.compiler.disable(create_causal_mask) if reads_values else create_causal_mask
        mask = make_mask(self.config, x, attention_mask, cache)
        # Not for the mask of a step with a static cache: a compiled graph must not read the length of that cache.
        may_have_documents = mask is None or getattr(mask, "is_padding_only", False)
        if may_have_documents and (cache is None or cache.get_seq_length() == 0):
            check_position_shape(position_ids, x)
            mask = with_documents(mask, position_ids, cu_seq_lens_q, x.shape[:2])
        keep_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keep_routing = _wants_router_logits(self.config, output_router_logits)
        states, routing = [], []
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer for assistant_early_exit of generate()
            if keep_states:
                states.append(x)
            if keep_routing:
                x, router_logits = layer(x, mask, cache, True)
                routing.append(router_logits)
            else:
                x = layer(x, mask, cache)
        x = self.norm(x)
        outputs = (x, cache, (*states, x) if keep_states else None)
        if keep_routing:
            return MoeModelOutputWithPast(*outputs, router_logits=tuple(routing))
        return BaseModelOutputWithPast(*outputs)


class StickBreakingForCausalLM(StickBreakingPreTrainedModel, GenerationMixin):
    """The decoder with its output layer.

    Args:
        config: sizes and options.

    Example:
        >>> import torch
        >>> from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
        >>> model = StickBreakingForCausalLM(StickBreakingConfig(vocab_size=257, hidden_size=128, num_hidden_layers=2))
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: StickBreakingConfig) -> None:
        super().__init__(config)
        self.model = StickBreakingModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the model and its code, and a model card. A README.md in the folder is kept. See the base class."""
        super().save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            write_card(Path(save_directory), self.config)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = "Upload model",
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> str:
        """Upload the files of `save_pretrained`. The signature is that of transformers.

        A README.md in the repository is kept. transformers would replace the model card by one without facts.

        Args:
            repo_id: name of the repository, which is created if it does not exist.
            commit_message: of the commit. Default "Upload model".
            commit_description: of the commit. Default None.
            private: whether a new repository is private. Default None: as the account says.
            token: of the account. Default None: the stored one.
            revision: branch, which is created if it does not exist. Default None: main.
            create_pr: open a pull request. Default False.
            max_shard_size: largest size of a file with weights. Default "50GB".
            tags: additional tags of a new model card. Default None.

        Returns:
            The address of the commit.
        """
        api = HfApi(library_name="megatron_sb", token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            card = Path(folder) / "README.md"
            if api.file_exists(repo_id, card.name, revision=revision):
                card.unlink()
            else:
                model_card = ModelCard.load(card)
                model_card.data.tags = sorted({*model_card.data.tags, *(self.model_tags or ()), *(tags or ())})
                model_card.save(card)
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message,
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: int | Tensor | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        """Compute logits, and the loss of the next tokens if labels or shift_labels are given.

        The arguments without a description are those of `StickBreakingModel.forward`. transformers reads their names
        from the signature: its Trainer drops columns of other names, and generate() makes the masks that are named.

        Args:
            input_ids, attention_mask, position_ids, cache, past_key_values, inputs_embeds: see above.
            labels: (b, s), usually input_ids; -100 excludes a token from the loss. Not valid in `shared_sequence`.
            use_cache, output_hidden_states, output_attentions, cu_seq_lens_q: see above.
            logits_to_keep: number of last tokens to compute logits for (0: all), or their indices. Default 0.
            num_items_in_batch: divisor of the summed loss. Default None: the number of labels.
            output_router_logits: return the router logits and their load-balancing loss, and add this loss, times
                config.router_aux_loss_coef, to the loss. Default None: config.output_router_logits.
            kwargs: `shift_labels`, (b, s), the next token of each position, -100 for none. It replaces labels where a
                row of input_ids is a part of a sequence. Default None: labels, shifted by one. Other arguments are
                ignored.

        Returns:
            loss, logits (b, kept tokens, vocab_size), the cache and hidden_states. With output_router_logits also
            aux_loss and router_logits, fp32 (b * s, num_experts) for each layer.

        Raises:
            TypeError: if an argument has a wrong type.
            ValueError: if output_router_logits is True and the model has no experts, labels or shift_labels have
                another shape than the logits' tokens, or an argument is not supported.
        """
        # Not an argument: the Trainer takes every argument with "label" in its name for a required label.
        shift_labels = kwargs.pop("shift_labels", None)
        _check_labels(labels, shift_labels, input_ids if inputs_embeds is None else inputs_embeds, logits_to_keep)
        keep_routing = _wants_router_logits(self.config, output_router_logits)
        outputs = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            cu_seq_lens_q=cu_seq_lens_q,
            output_router_logits=keep_routing,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept]) / self.config.logits_scaling
        loss = None
        if labels is not None or shift_labels is not None:
            shifted = None if shift_labels is None else shift_labels.contiguous()  # for a view in transformers
            options = {"num_items_in_batch": num_items_in_batch, "shift_labels": shifted}
            loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        common = (logits, getattr(outputs, CACHE_FIELD), outputs.hidden_states)
        if not keep_routing:
            return CausalLMOutputWithPast(loss, *common)
        aux_loss = _load_balancing_loss(self.config, outputs, attention_mask)
        if loss is not None:
            loss = loss + self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(loss, aux_loss, *common, router_logits=outputs.router_logits)
