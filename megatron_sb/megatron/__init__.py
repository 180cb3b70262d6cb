"""Stick-breaking attention for Megatron-Core models (`core_attention`, layer specs, flags)."""

import importlib

# Imported when asked for: the launcher has to choose which Megatron is found before anything imports it.
_MODULES = {
    "CheckedSelfAttention": "spec",
    "StickBreakingCoreAttention": "core_attention",
    "StickBreakingOptions": "arguments",
    "add_arguments": "arguments",
    "install_stand_ins": "stand_ins",
    "options_from_args": "arguments",
    "shared_plans": "core_attention",
    "with_stickbreaking": "spec",
}

__all__ = [*_MODULES]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
