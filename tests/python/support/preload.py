"""What the fork server imports before it forks (see fork_server.py): all that several tests' processes import."""

import contextlib
import importlib

for module in (
    "torch.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_sb.checkpoints",
    "megatron_sb.huggingface",
    "megatron_sb.megatron",
    "megatron_sb.training.loop",
    "support.accuracy",
    "support.megatron_cpu",
):
    with contextlib.suppress(ImportError):  # Megatron-Core and transformers are optional
        importlib.import_module(module)
