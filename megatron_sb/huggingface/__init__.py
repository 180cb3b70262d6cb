"""Stick-breaking attention for Hugging Face's transformers.

Importing this package registers the attention "stickbreaking" and the model type "stick_breaking" with transformers.
`StickBreakingForCausalLM` is the model that `megatron-sb train` trains.

Example:
    >>> import torch
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> from megatron_sb.huggingface import without_positions
    >>> sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    >>> config = without_positions(LlamaConfig(num_hidden_layers=2, **sizes))
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking")
    >>> model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 100])
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_sb.huggingface import attention
from megatron_sb.huggingface.attention import without_positions
from megatron_sb.huggingface.byte_tokenizer import byte_tokenizer
from megatron_sb.huggingface.configuration import StickBreakingConfig
from megatron_sb.huggingface.modeling import StickBreakingForCausalLM, StickBreakingModel

attention.register()
AutoConfig.register(StickBreakingConfig.model_type, StickBreakingConfig)
AutoModel.register(StickBreakingConfig, StickBreakingModel)
AutoModelForCausalLM.register(StickBreakingConfig, StickBreakingForCausalLM)

__all__ = [
    "StickBreakingConfig",
    "StickBreakingForCausalLM",
    "StickBreakingModel",
    "byte_tokenizer",
    "without_positions",
]
