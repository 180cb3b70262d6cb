"""A typical training script for Megatron, which does not mention stick-breaking: a model on Megatron's mock data.

The model is a GPT, or a hybrid model with `--hybrid-layer-pattern` and `--spec`, as in pretrain_hybrid.py.

    python megatron_pretrain.py FLAGS OF MEGATRON          trains on GPUs
    python megatron_pretrain.py ... --build-only OUT.json  builds the model on one CPU and writes its attention classes

With `--dataloader-inter-document-masking`, Megatron packs short documents into each micro-batch of its mock data.

It needs `megatron.training` (in Megatron-Core's wheel from 0.17 on).
"""

import json
import os
import signal
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset, MockGPTLowLevelDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args

BATCH = ("tokens", "labels", "loss_mask", "position_ids")
MAX_DOCUMENT = 40  # tokens, in packed micro-batches


def add_own_arguments(parser):
    """Add the script's own flags."""
    parser.add_argument("--build-only", metavar="OUT.json")
    parser.add_argument("--record-documents", metavar="FOLDER", help="Write cu_seqlens of each micro-batch, by rank.")
    parser.add_argument(
        "--kill-in-backward",
        type=int,
        metavar="STEP",
        help="SIGKILL torchrun and this rank in the backward of this step, before the attention of the last layer.",
    )
    return parser


def loss_func(loss_mask, losses):
    """Return the sum of unmasked token losses, their number, and both for the log."""
    loss, num_tokens = (losses.float() * loss_mask).sum(), loss_mask.sum().int()
    return loss, num_tokens, {"lm loss": torch.stack((loss.detach(), num_tokens.float()))}


def forward_step(data_iterator, model):
    """Compute the token losses of this context-parallel rank's shard of a micro-batch."""
    sample, args = next(data_iterator), get_args()
    batch = {name: sample[name].cuda() for name in BATCH}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    if args.kill_in_backward == args.curr_iteration + 1:
        kill_in_backward(model)
    packed = {"packed_seq_params": documents_of(sample["cu_seqlens"])} if "cu_seqlens" in sample else {}
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **packed)
    return losses, partial(loss_func, batch["loss_mask"])


def documents_of(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """Return the documents of a micro-batch of one row. cu_seqlens: (1, n), where the last offset is repeated."""
    (offsets,) = cu_seqlens
    offsets = offsets.unique_consecutive()
    if folder := get_args().record_documents:
        with open(Path(folder) / f"rank_{dist.get_rank()}", "a") as file:
            print(*offsets.tolist(), file=file)
    longest = int(offsets.diff().max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def kill_in_backward(model: torch.nn.Module) -> None:
    """Let the next backward kill torchrun, which started this rank, this rank and its writer of checkpoints.

    The gradient of the last layer's projection of the output is computed before those of its attention.
    """
    weights = [weight for name, weight in model.named_parameters() if name.endswith("linear_proj.weight")]

    def kill(gradient: torch.Tensor) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    weights[-1].register_hook(kill)


def make_datasets(num_samples, vp_stage=None):
    """Make Megatron's mock documents. The tokens of a document count upwards, modulo the size of the vocabulary."""
    args = get_args()
    if args.dataloader_inter_document_masking:
        MockGPTLowLevelDataset.max_sequence_length = MAX_DOCUMENT
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="90,5,5",
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


def describe_attention(model_config) -> list[list[str]]:
    """Return the classes of attention, core attention and norm in every layer of a model on one CPU rank.

    Layers without attention are left out.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.cuda.current_device = lambda: torch.device("cpu")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = model_config.get_builder_cls()(model_config).build_model(groups)
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    layers = [layer for layer in layers if hasattr(layer.self_attention, "core_attention")]
    parts = [(layer.self_attention, layer.self_attention.core_attention, layer.input_layernorm) for layer in layers]
    return [[type(part).__name__ for part in layer] for layer in parts]


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_own_arguments)
    make_config = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    model_config = make_config(args)
    if args.build_only:
        Path(args.build_only).write_text(json.dumps(describe_attention(model_config)))
    else:
        dataset_utils.compile_helpers = lambda: None  # the wheel contains them compiled, without a Makefile
        make_datasets.is_distributed = True
        config = pretrain_cfg_container_from_args(args, model_config)
        pretrain(config, make_datasets, ModelType.encoder_or_decoder, forward_step)
