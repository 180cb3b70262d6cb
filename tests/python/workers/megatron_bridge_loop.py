"""Train a small model on mock data in Megatron-Bridge's own loop, with its recipe for Llama 3.2 1B, on CPUs.

`megatron_bridge_loop.py OUT.json FOLDER STEPS OPTIONS`. Several ranks are context-parallel. The run stops after STEPS
of 4 steps and saves a checkpoint in FOLDER. It resumes from the checkpoint that is there. OPTIONS: those of the layers,
as JSON. Writes the losses, or the message of the error.
"""

import functools
import json
import os
import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import megatron_cpu
from workers import megatron_bridge

STEPS, ROWS = 4, 48
LEARNING_RATE = 5e-3


def import_loop() -> tuple:
    """Return what a training script imports of Megatron-Bridge."""
    with megatron_bridge.stand_in_for_transformer_engine():
        from megatron.bridge import AutoBridge
        from megatron.bridge.recipes.llama.h100.llama3 import llama32_1b_pretrain_1gpu_h100_bf16_config
        from megatron.bridge.training import initialize
        from megatron.bridge.training.callbacks import Callback
        from megatron.bridge.training.gpt_step import forward_step
        from megatron.bridge.training.pretrain import pretrain
    initialize.compile_helpers = lambda: None  # the wheel contains them compiled
    initialize._warmup_jit_function = lambda *args, **kwargs: None  # it would change the generator of the weights
    return AutoBridge, llama32_1b_pretrain_1gpu_h100_bf16_config, pretrain, forward_step, Callback


def set_sizes(config, steps: int, folder: Path) -> None:
    """Set what a recipe leaves to its user, for a small model, mock data and fp32 on a CPU."""
    config.model.seq_length = config.dataset.seq_length = ROWS
    config.dataset.num_workers = 0
    config.model.vocab_size, config.model.cross_entropy_loss_fusion = megatron_bridge.VOCABULARY, False
    config.tokenizer.tokenizer_type, config.tokenizer.use_tokenizer_vocab_size = "NullTokenizer", False
    config.tokenizer.vocab_size = megatron_bridge.VOCABULARY - 1
    config.train.train_iters, config.train.exit_interval = STEPS, steps if steps < STEPS else None
    config.train.global_batch_size, config.train.micro_batch_size = 4, 2
    config.validation.eval_iters = 0
    config.optimizer.lr = config.optimizer.min_lr = LEARNING_RATE
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_style = 0, "constant"
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.checkpoint.save = config.checkpoint.load = str(folder / "checkpoints")
    config.mixed_precision = None
    config.ddp.overlap_grad_reduce = config.ddp.overlap_param_gather = False
    config.dist.distributed_backend = "gloo"
    config.model.context_parallel_size = int(os.environ["WORLD_SIZE"])
    config.model.calculate_per_token_loss = config.model.context_parallel_size > 1
    config.ddp.average_in_collective = False


def main(out: Path, folder: Path, steps: int, options: dict) -> None:
    """Train, and write the losses or the message."""
    megatron_cpu.answer_for_gpu()
    megatron_cpu.answer_for_streams()
    megatron_cpu.answer_for_training()
    bridge, recipe, pretrain, forward_step, callback = import_loop()
    from megatron_sb.megatron import stickbreaking_block_spec

    losses = []

    class Losses(callback):
        def on_train_step_end(self, context) -> None:
            losses.append(context.loss_dict["lm loss"].flatten()[0].item())

    os.chdir(folder)
    llama = folder / f"llama{os.environ['RANK']}"
    megatron_bridge.save_llama(llama, megatron_bridge.Run.on_cpu().sizes)
    small = bridge.from_hf_pretrained(str(llama))
    with mock.patch.object(bridge, "from_hf_pretrained", return_value=small):  # the recipe would download its model
        config = recipe()
    config.model.transformer_layer_spec = functools.partial(stickbreaking_block_spec, **options)
    config.model.position_embedding_type, config.model.attention_dropout = "none", 0.0
    config.model.params_dtype = torch.float32
    config.model.bf16 = False
    for name, value in megatron_bridge.LOCAL.items():
        setattr(config.model, name, value)
    set_sizes(config, steps, folder)
    findings = {"losses": losses, "error": None}
    try:
        with megatron_cpu.TensorsOnTheCpu():
            pretrain(config, forward_step, callbacks=[Losses()])
    except SystemExit:  # after exit_interval
        pass
    except ValueError as error:
        findings["error"] = str(error)
    if os.environ["RANK"] == "0":
        out.write_text(json.dumps(findings))
    os._exit(0)  # the destructors of gloo's threads sometimes abort the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
