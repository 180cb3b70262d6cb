"""A small Llama with stick-breaking attention, as a module for torchtitan's `--module`."""

from functools import partial

from torch import nn
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from megatron_sb.options import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, head_dim_problem

from .model import NoPositions, StickBreakingInnerAttention, StickBreakingModel
from .parallelize import parallelize

_MATRIX = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
_NORM = {"weight": nn.init.ones_}


def model_config(
    *,
    vocab_size: int,
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    hidden_dim: int,
    reach: tuple[float, float] | None = (0.5, 10.0),
) -> StickBreakingModel.Config:
    """Return the configuration of a model.

    Args:
        vocab_size: rows of the embedding.
        dim: channels between the layers.
        n_layers: number of layers.
        n_heads: query heads of a layer.
        n_kv_heads: KV heads of a layer.
        hidden_dim: channels inside a feed-forward block.
        reach: how far the first and the last head reach at the start, see `sb.stickbreaking_attention`.

    Raises:
        ValueError: If the attention has no kernels for heads of dim / n_heads channels.
    """
    head_dim, rest = divmod(dim, n_heads)
    if rest or head_dim_problem("head_dim", head_dim):
        raise ValueError(
            f"dim must be n_heads = {n_heads} times a multiple of {HEAD_DIM_MULTIPLE} that is at most {MAX_HEAD_DIM}, "
            f"got {dim}."
        )
    norm = partial(RMSNorm.Config, normalized_shape=dim, param_init=_NORM)
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=dim,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                wqkv_param_init=_MATRIX,
                wo_param_init=_MATRIX,
                inner_attention=StickBreakingInnerAttention.Config(n_heads=n_heads, reach=reach),
                rope=NoPositions.Config(),
                fuse_qkv=True,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=hidden_dim, w1_param_init=_MATRIX, w2w3_param_init=_MATRIX
            ),
        )
        for _ in range(n_layers)
    ]
    return StickBreakingModel.Config(
        dim=dim,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=_MATRIX),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_MATRIX),
        layers=layers,
    )


FLAVORS = {
    "debugmodel": {"vocab_size": 264, "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 192},
}


def model_registry(flavor: str) -> ModelSpec:
    """Return what torchtitan's trainer needs to know of a model.

    Args:
        flavor: a key of FLAVORS.

    Raises:
        ValueError: If there is no such flavor.
    """
    if flavor not in FLAVORS:
        raise ValueError(f"flavor must be one of {', '.join(map(repr, FLAVORS))}, got {flavor!r}.")
    return ModelSpec(
        name="stickbreaking_llama",
        flavor=flavor,
        model=model_config(**FLAVORS[flavor]),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
