"""The trainer: stages of growing context length, with an evaluation by context length after each stage.

The trainer runs the experiments and small jobs. It gets no further features: use Megatron-LM for large runs. Importing
this package loads neither torch nor Megatron-Core.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_sb.training.launch import main

__all__ = ["main"]


def __getattr__(name: str):
    if name == "main":
        from megatron_sb.training.launch import main

        return main
    raise AttributeError(f"module 'megatron_sb.training' has no attribute {name!r}")
