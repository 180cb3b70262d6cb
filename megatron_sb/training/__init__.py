"""The trainer: stages of growing context length, with an evaluation by context length after each stage.

The trainer is frozen in scope. It is the embedded default and the bench of the experiments; what Megatron-LM does, it
leaves to Megatron-LM. Importing this package loads neither torch nor Megatron-Core.
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
