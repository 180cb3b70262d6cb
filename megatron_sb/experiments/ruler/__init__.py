"""The thirteen tasks of RULER (Hsieh et al., arXiv 2404.06654), made by rule in any length, over the text of the Python
standard library.

A task is a function of (generator, length, texts) that gives a `Sample` of at most `length` bytes, question and answers
counted, and nearly as many; the same for the same state of the generator. Raises ValueError where its question does not
fit.
"""

from megatron_sb.experiments.ruler.rows import MixedSampler, TaskRow, encoded
from megatron_sb.experiments.ruler.sample import Sample
from megatron_sb.experiments.ruler.tasks import GROUPS, TASKS
from megatron_sb.experiments.ruler.texts import Texts, load_texts

__all__ = ["GROUPS", "TASKS", "MixedSampler", "Sample", "TaskRow", "Texts", "encoded", "load_texts"]
