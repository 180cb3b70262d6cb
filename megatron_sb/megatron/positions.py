"""Find learned positions in models that a user's own script builds.

Megatron's `GPTModel` adds learned positions by default. The layers do not see this: the embedding adds them before the
first layer, and the config does not name them. So this module makes each embedding write them into its config. Megatron
builds the embedding before the layers, and these read it there. The layers of a heterogeneous model have configs of
their own, which get the record from the config of the model.
"""

from __future__ import annotations

import functools

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig

_ADDED, _WATCHED = "_adds_learned_positions", "_sb_watched"


def watch_embeddings() -> None:
    """Make embeddings of Megatron-Core record in their config whether they add learned positions.

    It wraps `LanguageModelEmbedding.__init__` and `HeterogeneousTransformerConfig.get_config_for_layer`, once. Nothing
    else changes.
    """
    build, config_of_layer = LanguageModelEmbedding.__init__, HeterogeneousTransformerConfig.get_config_for_layer
    if hasattr(build, _WATCHED):
        return

    @functools.wraps(build)
    def build_and_record(self, config, *args, **kwargs) -> None:
        build(self, config, *args, **kwargs)
        setattr(config, _ADDED, bool(getattr(self, "add_position_embedding", False)))

    @functools.wraps(config_of_layer)
    def config_with_record(self, *args, **kwargs) -> object:
        config = config_of_layer(self, *args, **kwargs)  # a new object, made from the fields of a TransformerConfig
        setattr(config, _ADDED, getattr(self, _ADDED, False))
        return config

    setattr(build_and_record, _WATCHED, True)
    LanguageModelEmbedding.__init__ = build_and_record
    HeterogeneousTransformerConfig.get_config_for_layer = config_with_record


def check_learned_positions(config: object) -> None:
    """Raise ValueError if the embedding of this config's model adds learned positions.

    Args:
        config: the TransformerConfig of the model.

    Example:
        >>> from types import SimpleNamespace
        >>> from megatron_sb.megatron.positions import check_learned_positions
        >>> check_learned_positions(SimpleNamespace())  # no embedding has been built with this config
    """
    if getattr(config, _ADDED, False):
        raise ValueError(
            "position_embedding_type of the model (--position-embedding-type) must be 'none' with stick-breaking "
            "attention, got 'learned_absolute', the default of GPTModel: the order of the keys encodes positions. "
            "Pass position_embedding_type='none'."
        )
