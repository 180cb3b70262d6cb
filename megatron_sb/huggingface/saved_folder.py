"""The files of a saved model other than its weights and configuration: code that runs it, and a model card.

The code is a copy of the modules in MODULES, with relative imports, because transformers copies the files of a folder
that import each other in this way. It runs the model in pure torch where this package is not installed.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

LOADER = "load_stick_breaking"  # the module in a saved folder that config.json names
AUTO_CLASSES = {
    "AutoConfig": "StickBreakingConfig",
    "AutoModel": "StickBreakingModel",
    "AutoModelForCausalLM": "StickBreakingForCausalLM",
}
# Modules that are copied, by the module that imports name. Their names in a folder have the suffix "_stick_breaking".
MODULES = {
    "huggingface.attention": "huggingface.attention",
    "huggingface.configuration": "huggingface.configuration",
    "huggingface.modeling": "huggingface.modeling",
    "huggingface.operators": "huggingface.plain_operators",
    "huggingface.packing": "huggingface.packing",
    "huggingface.saved_folder": "huggingface.saved_folder",
    "nn.gates": "nn.gates",
    "ops.snapshot": "ops.snapshot",
    "options": "options",
    "validation": "validation",
}
_HERE = Path(__file__).parent
_HEADER = "# A copy of {path} of megatron_sb {version} (Apache-2.0), in which imports are relative.\n"
# transformers reads no requirements from a try block, so the package need not be installed.
_LOADER_TEXT = '''"""The classes of this model: those of megatron_sb, or of this folder if it cannot be imported."""

import warnings

try:
    from megatron_sb.huggingface import {classes}
except ImportError as error:
    try:
        from .attention_stick_breaking import register
        from .configuration_stick_breaking import StickBreakingConfig
        from .modeling_stick_breaking import StickBreakingForCausalLM, StickBreakingModel
    except ImportError as missing:
        import transformers

        raise ImportError(
            "transformers must be of version 5.17 or later, and below 6, to load this model without megatron_sb, "
            f"got {{transformers.__version__}}: {{missing}}. Install it: pip install 'transformers>=5.17,<6'."
        ) from missing
    register()
    warnings.warn(
        f"megatron_sb could not be imported ({{error}}). This model runs in pure torch, which is slow. The results are "
        "the same within rounding. For speed, install the package megatron_sb.",
        stacklevel=2,
    )

__all__ = [{quoted}]
'''
_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- stick-breaking-attention
---

# Stick-breaking decoder

A decoder with stick-breaking attention ([arXiv 2410.17980](https://arxiv.org/abs/2410.17980)) and without position
embeddings, made with megatron_sb.

| | |
| --- | --- |
{facts}

## Load

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("REPOSITORY", trust_remote_code=True)
```

`REPOSITORY` is the name of this repository, or a folder with its files. The model needs torch and transformers 5.17 or
later. The code in this repository runs it in pure torch, which is slow. With the package megatron_sb installed, the
same call uses the kernels of that package.
"""


def saved_name(module: str) -> str:
    """Return the name in a folder of a module of this package.

    Args:
        module: one of the keys of MODULES.

    Example:
        >>> from megatron_sb.huggingface.saved_folder import saved_name
        >>> saved_name("huggingface.modeling")
        'modeling_stick_breaking'
    """
    return f"{module.rpartition('.')[2]}_stick_breaking"


def write_code(folder: Path) -> None:
    """Write the code of the models into an existing folder.

    Args:
        folder: the folder, which may hold the code already.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from megatron_sb.huggingface.saved_folder import write_code
        >>> folder = Path(tempfile.mkdtemp())
        >>> write_code(folder)
        >>> (folder / "modeling_stick_breaking.py").exists()
        True
    """
    for module in MODULES:
        (folder / f"{saved_name(module)}.py").write_text(_saved_code(module), encoding="utf-8")
    names = sorted(AUTO_CLASSES.values())
    text = _LOADER_TEXT.format(classes=", ".join(names), quoted=", ".join(f'"{name}"' for name in names))
    (folder / f"{LOADER}.py").write_text(text, encoding="utf-8")


def _saved_code(module: str) -> str:
    """Return the text of a module for a saved folder."""
    copied = _HERE / f"{saved_name(module)}.py"
    if copied.exists():  # this module is a copy itself
        return copied.read_text(encoding="utf-8")
    package = importlib.import_module("megatron_sb")
    path = Path(f"{MODULES[module].replace('.', '/')}.py")
    text = (_HERE.parent / path).read_text(encoding="utf-8")
    text = re.sub(r"^from megatron_sb\.([\w.]+)(?= import)", lambda of: f"from .{saved_name(of[1])}", text, flags=re.M)
    return _HEADER.format(path=f"megatron_sb/{path.as_posix()}", version=package.__version__) + text


def write_card(folder: Path, config: Any) -> None:
    """Write a model card, README.md, into a folder with weights. A file of this name is kept.

    Args:
        folder: folder with the safetensors files of the model. Without such files, no card is written.
        config: the `StickBreakingConfig` of the model.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM
        >>> config = StickBreakingConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> folder = tempfile.mkdtemp()
        >>> StickBreakingForCausalLM(config).save_pretrained(folder)
        >>> "| heads | 4 query heads and 4 KV heads of 8 channels |" in (Path(folder) / "README.md").read_text()
        True
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths or (folder / "README.md").exists():
        return
    size, dtypes = _size_and_dtypes(paths)
    facts = {
        "parameters": f"{size:,}, stored as {', '.join(dtypes)}",
        "layers": f"{config.num_hidden_layers} of width {config.hidden_size}",
        "heads": f"{config.num_attention_heads} query heads and {config.num_key_value_heads} KV heads of "
        f"{config.head_dim} channels",
        "vocabulary": f"{config.vocab_size} tokens",
        "`max_position_embeddings`": f"{config.max_position_embeddings}; longer texts are accepted",
    }
    if config.num_experts:
        facts["experts"] = f"{config.num_experts} in each layer, {config.num_experts_per_tok} for each token"
    options = (
        "logits",
        "reach",
        "forget_gate",
        "attend_current",
        "remainder_bias",
        "head_norm",
        "qkv_bias",
        "mass_threshold",
    )
    facts["attention"] = ", ".join(f"`{name}={getattr(config, name)!r}`" for name in options)
    lines = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    (folder / "README.md").write_text(_CARD.format(facts=lines), encoding="utf-8")


def _size_and_dtypes(paths: Iterable[Path]) -> tuple[int, list[str]]:
    """Return the number of elements, and the dtypes, of the tensors in safetensors files. Reads only their headers."""
    size, dtypes = 0, set()
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                tensor = file.get_slice(name)
                size += math.prod(tensor.get_shape())
                dtypes.add(tensor.get_dtype())
    return size, sorted(dtypes)
