"""Tasks that the trainer can train on: `data.kind` -> classes of the configuration's `data` section.

The table holds "module:class" strings and imports nothing, so the trainer depends on no task. The first class of a kind
has the fields that every configuration of this kind may set. Each later class adds fields to it, and is used for a
configuration that sets one of them.

Another package adds a kind with an entry point in the group "megatron_sb.tasks". The name of the entry point is the
kind, and its value is the "module:class" string.
"""

import importlib
import importlib.metadata
from typing import Any

TASKS = {
    "text": (
        "megatron_sb.training.config.data:TextDataConfig",
        "megatron_sb.experiments.ruler.mixture:RulerMixtureDataConfig",
    ),
    "indexed": (
        "megatron_sb.training.config.data:IndexedDataConfig",
        "megatron_sb.experiments.ruler.mixture:RulerMixtureIndexedDataConfig",
    ),
    "recall": ("megatron_sb.experiments.recall:RecallDataConfig",),
}
ENTRY_POINTS = "megatron_sb.tasks"


def find_tasks() -> dict[str, tuple[str, ...]]:
    """Return TASKS and the kinds that installed packages add. A package cannot replace a kind in TASKS.

    Example:
        >>> from megatron_sb._tasks import find_tasks
        >>> find_tasks()["recall"]
        ('megatron_sb.experiments.recall:RecallDataConfig',)
    """
    added = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: (point.value,) for point in added} | TASKS


def import_object(name: str) -> Any:
    """Return the object that "module:attribute" names.

    Example:
        >>> from megatron_sb._tasks import import_object
        >>> import_object("math:gcd")(12, 18)
        6
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
