"""The training configuration: typed, read from YAML, checked field by field.

Importing this package loads neither torch nor Megatron-Core.

Example:
    >>> from megatron_sb.training.config import load_config
    >>> load_config("configs/tiny_context_extension.yaml", ["seed=7"]).seed
    7
"""

import warnings

from megatron_sb.training.config.checks import check_packages, needs_gpu
from megatron_sb.training.config.data import (
    BYTE_VOCAB_SIZE,
    SITE_PACKAGES,
    STANDARD_LIBRARY,
    TEXT_OF_PYTHON,
    DataConfig,
    DocumentDataConfig,
    IndexedDataConfig,
    TextDataConfig,
)
from megatron_sb.training.config.loader import flatten, load_config, load_fields, to_yaml
from megatron_sb.training.config.parameters import ParameterCount, count_parameters
from megatron_sb.training.config.schema import (
    AttentionConfig,
    CheckpointConfig,
    EvaluationConfig,
    GatedDeltaNetConfig,
    LayerAttentionConfig,
    MixedAttentionConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    RotaryKind,
    SoftmaxAttentionConfig,
    StageConfig,
    StickBreakingAttentionConfig,
    TrainingConfig,
)
from megatron_sb.training.config.types import ConfigError

__all__ = [
    "BYTE_VOCAB_SIZE",
    "SITE_PACKAGES",
    "STANDARD_LIBRARY",
    "TEXT_OF_PYTHON",
    "AttentionConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DocumentDataConfig",
    "EvaluationConfig",
    "GatedDeltaNetConfig",
    "IndexedDataConfig",
    "LayerAttentionConfig",
    "MixedAttentionConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterCount",
    "ReportConfig",
    "RotaryKind",
    "SoftmaxAttentionConfig",
    "StageConfig",
    "StickBreakingAttentionConfig",
    "TextDataConfig",
    "TrainingConfig",
    "check_packages",
    "count_parameters",
    "flatten",
    "load_config",
    "load_fields",
    "needs_gpu",
    "to_yaml",
]


_RENAMED = {"SoftmaxConfig": SoftmaxAttentionConfig, "StickBreakingConfig": StickBreakingAttentionConfig}


def __getattr__(name: str):
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"{name} is deprecated; use {new.__name__} instead.", DeprecationWarning, stacklevel=2)
    return new
