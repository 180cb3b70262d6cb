"""The thirteen tasks of RULER (Hsieh et al., arXiv 2404.06654), generated from the Python standard library's text.

A task is a function (generator, length, texts) -> `Sample`. The sample, with its question and answers, has at most
`length` bytes and is as long as possible. It depends only on the arguments and the generator's state. A task raises
ValueError if its question does not fit.
"""

from megatron_sb.experiments.ruler.rows import MixedSampler, TaskRow, encode
from megatron_sb.experiments.ruler.sample import Sample
from megatron_sb.experiments.ruler.tasks import GROUPS, TASKS
from megatron_sb.experiments.ruler.texts import Texts, load_texts

__all__ = ["GROUPS", "TASKS", "MixedSampler", "Sample", "TaskRow", "Texts", "encode", "load_texts"]
