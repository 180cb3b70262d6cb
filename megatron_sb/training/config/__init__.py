"""The training configuration: typed, read from YAML, refused by field name when it is wrong.

`schema` has the fields, `checks` what may not be together, `parameters` how many weights the sizes make, `loader` reads
and writes, `lm_engine` understands the model section of lm-engine's files. Needs neither torch nor a device.
"""

from megatron_sb.training.config.checks import needs_gpu
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
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    ReportConfig,
    RotaryKind,
    SoftmaxConfig,
    StageConfig,
    StickBreakingConfig,
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
    "IndexedDataConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParameterCount",
    "ReportConfig",
    "RotaryKind",
    "SoftmaxConfig",
    "StageConfig",
    "StickBreakingConfig",
    "TextDataConfig",
    "TrainingConfig",
    "count_parameters",
    "flatten",
    "load_config",
    "load_fields",
    "needs_gpu",
    "to_yaml",
]
