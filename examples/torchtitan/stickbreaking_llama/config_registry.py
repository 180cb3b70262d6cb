"""The configurations for torchtitan's `--config`."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.trainer import Trainer

from . import model_registry
from .data import ByteTokenizer


def debugmodel() -> Trainer.Config:
    """Return a run of 20 steps on the paragraphs of this repository's documentation, in fp32."""
    spec = model_registry("debugmodel")
    return Trainer.Config(
        model_spec=spec,
        dump_folder="runs/torchtitan",
        hf_assets_path=".",  # the tokenizer has no files
        tokenizer=ByteTokenizer.Config(),
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=3e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=512,
            steps=20,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,  # the model reads where documents begin
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="paragraphs"),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=1),
    )
