"""Stick-breaking attention for Megatron-Core models: core attention, layer specs and command-line flags."""

import importlib

# Name -> module. A name is imported on first use: the launcher must set sys.path before anything imports Megatron.
_MODULES = {
    "CheckedMLASelfAttention": "checked_attention",
    "CheckedSelfAttention": "checked_attention",
    "StickBreakingCoreAttention": "core_attention",
    "StickBreakingOptions": "arguments",
    "add_arguments": "arguments",
    "install_stand_ins": "stand_ins",
    "options_from_args": "arguments",
    "shared_plans": "plans",
    "stickbreaking_block_spec": "spec",
    "with_stickbreaking": "spec",
}

__all__ = [*_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
