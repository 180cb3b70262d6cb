"""Checkpoints of Megatron-Bridge: their attention is compared with that of the model that resumes from them."""

import functools
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from support.messages import mentions

from megatron_sb.megatron import stickbreaking_block_spec
from megatron_sb.megatron.bridge_checkpoints import (
    BLOCK_SPEC,
    CHECKPOINTING,
    check_run_config,
    compare_when_bridge_loads,
)

STOCK = "megatron.bridge.models.gpt_provider.default_layer_spec"
PLAIN, PARTIAL = {"_call_": False, "_target_": BLOCK_SPEC}, {"_args_": [], "_partial_": True, "_target_": BLOCK_SPEC}


def write_run_config(folder, layer_spec) -> None:
    """Write the settings of a job as Megatron-Bridge does."""
    (folder / "run_config.yaml").write_text(yaml.safe_dump({"model": {"transformer_layer_spec": layer_spec}}))


@pytest.mark.parametrize(
    ("saved", "own", "words"),
    [
        (PLAIN, {}, None),
        ({**PARTIAL, "reach": [0.5, 8]}, {"reach": (0.5, 8)}, None),
        ({**PARTIAL, "layers": [1, 1]}, {}, None),
        ({**PARTIAL, "mass_threshold": 0.0, "cp_layout": "contiguous"}, {}, None),
        ({"_target_": "my_project.make_spec", "_call_": False}, {}, None),
        (None, {}, None),
        (PLAIN, {"attend_current": True}, "attend_current transformer_layer_spec False True functools.partial"),
        ({**PARTIAL, "reach": [0.5, 8]}, {"reach": (0.5, 9)}, "reach (0.5, 8) (0.5, 9)"),
        ({**PARTIAL, "layers": [1, 0]}, {}, "layers (1, 0) None"),
        ({"_target_": STOCK, "_call_": False}, {}, f"transformer_layer_spec '{STOCK}' '{BLOCK_SPEC}'"),
    ],
)
def test_comparison(saved, own, words, tmp_path):
    write_run_config(tmp_path, saved)
    layer_spec = functools.partial(stickbreaking_block_spec, **own) if own else stickbreaking_block_spec
    if words is None:
        check_run_config(tmp_path, layer_spec)
    else:
        with pytest.raises(ValueError, match=mentions(f"{words} {tmp_path} checkpoint.pretrained_checkpoint")):
            check_run_config(tmp_path, layer_spec)


def test_a_stock_model_and_an_unknown_one(tmp_path):
    write_run_config(tmp_path, PLAIN)
    with pytest.raises(ValueError, match=mentions(f"transformer_layer_spec '{BLOCK_SPEC}' get_gpt_layer_local_spec")):
        check_run_config(tmp_path, get_gpt_layer_local_spec)
    check_run_config(tmp_path, lambda config: None)
    check_run_config(tmp_path / "none", get_gpt_layer_local_spec)


def test_only_a_job_that_resumes_is_compared(tmp_path, monkeypatch):
    """Other loads give the weights to a new model, which may have another attention."""
    write_run_config(tmp_path, PLAIN)
    bridge = ModuleType(CHECKPOINTING)
    bridge._load_base_checkpoint = lambda load_dir, config, rank0=False, **kwargs: ({"step": 1}, load_dir, False, None)
    monkeypatch.setitem(sys.modules, CHECKPOINTING, bridge)
    compare_when_bridge_loads()
    patched = bridge._load_base_checkpoint
    compare_when_bridge_loads()
    assert bridge._load_base_checkpoint is patched

    def load(finetune: bool, resume_from: str) -> str:
        checkpoint = SimpleNamespace(load=resume_from, finetune=finetune)
        spec = functools.partial(stickbreaking_block_spec, head_norm=True)
        settings = SimpleNamespace(model=SimpleNamespace(transformer_layer_spec=spec))
        try:
            return str(patched(str(tmp_path), checkpoint, rank0=True, cfg=settings)[0])
        except ValueError as error:
            return str(error)

    assert load(True, str(tmp_path)) == load(False, "another") == str({"step": 1})
    assert re.search(mentions("head_norm False True"), load(False, str(tmp_path)))
