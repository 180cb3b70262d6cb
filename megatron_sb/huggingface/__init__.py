"""Stick-breaking attention for Hugging Face's transformers.

Importing this package registers the attention "stickbreaking" and the model type "stick_breaking" with transformers.
`StickBreakingForCausalLM` is the model that `megatron-sb train` trains.

Example:
    >>> import megatron_sb.huggingface
    >>> config = megatron_sb.huggingface.without_positions(AutoConfig.from_pretrained(NAME))
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="stickbreaking")
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
