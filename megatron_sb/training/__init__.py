"""The trainer: stages of growing context length, with an evaluation by context length after each stage.

The trainer runs the experiments and small jobs. It gets no further features: use Megatron-LM for large runs. Importing
this package loads neither torch nor Megatron-Core.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_sb.training.launch import main
    from megatron_sb.training.loading import load_run

__all__ = ["load_run", "main"]


def __getattr__(name: str):
    if name == "main":
        from megatron_sb.training.launch import main

        return main
    if name == "load_run":
        from megatron_sb.training.loading import load_run

        return load_run
    raise AttributeError(f"module 'megatron_sb.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
