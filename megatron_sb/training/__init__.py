"""The main job: training in stages of growing context, with evaluation by context length. Imports neither torch nor
Megatron-Core until it runs.
"""

from megatron_sb.training.launch import main

__all__ = ["main"]
