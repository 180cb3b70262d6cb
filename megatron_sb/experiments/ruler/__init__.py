"""The thirteen tasks of RULER (Hsieh et al., arXiv 2404.06654), made by rule in any length, over the text of the Python
standard library.

A task is a function of (generator, length, texts) that gives a `Sample` of at most `length` bytes, question and answers
counted, and nearly as many; the same for the same state of the generator. Raises ValueError where its question does not
fit.
"""

from megatron_sb.experiments.ruler import needles, questions, tracking, words
from megatron_sb.experiments.ruler.sample import SEPARATOR, Sample
from megatron_sb.experiments.ruler.texts import Texts, load_texts

TASKS = {
    "single_1": needles.single_noise,
    "single_2": needles.single_text,
    "single_3": needles.single_uuid,
    "multikey_1": needles.multikey_text,
    "multikey_2": needles.multikey_needles,
    "multikey_3": needles.multikey_uuids,
    "multivalue": needles.multivalue,
    "multiquery": needles.multiquery,
    "tracking": tracking.variable_tracking,
    "common_words": words.common_words,
    "frequent_words": words.frequent_words,
    "question": questions.single_hop,
    "question_2": questions.two_hops,
}
GROUPS = {
    "one needle": ("single_1", "single_2", "single_3"),
    "several needles": ("multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery"),
    "tracking": ("tracking",),
    "words": ("common_words", "frequent_words"),
    "questions": ("question", "question_2"),
}

__all__ = ["GROUPS", "SEPARATOR", "TASKS", "Sample", "Texts", "load_texts"]
