"""The thirteen tasks by name, and groups of them."""

from megatron_sb.experiments.ruler import needles, questions, tracking, words

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
