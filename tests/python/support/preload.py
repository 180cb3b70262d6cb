"""Import the modules that the processes of several tests need. The fork server imports this module before it forks."""

import contextlib
import gc
import importlib
from multiprocessing import context

from support import gloo

for module in (
    "matplotlib.pyplot",
    "torch.distributed.checkpoint.format_utils",
    "torch.utils.tensorboard",
    "megatron.core.distributed",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron_sb.checkpoints",
    "megatron_sb.huggingface",
    "megatron_sb.megatron",
    "megatron_sb.training.engine.engine",
    "megatron_sb.training.rank",
    "megatron.training.training",
    "support.accuracy",
    "support.megatron_cpu",
):
    with contextlib.suppress(ImportError):  # Megatron-Core and transformers are optional
        importlib.import_module(module)

gloo.share_devices()

# Megatron-Core's checkpoint writer spawns a process in every rank that saves. A fork need not import all this again.
context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]

# Garbage collections in a fork leave out the objects that exist now. They would copy the memory of all these modules:
# 0.6 s for each of Megatron-Core's calls of gc.collect().
gc.freeze()
