"""Run the vLLM model of examples/vllm on CPU ranks, and write how far its logits are from those of transformers.

`vllm_model.py OUT.json OPTIONS`. OPTIONS: those of the configuration, as JSON. Several ranks are tensor-parallel.
vLLM's wheel has no compiled functions for CPUs, so its linear layers get torch's function.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples/vllm"))
import support.vllm_cpu  # noqa: I001  # before vLLM's layers
import megatron_sb_vllm
import megatron_sb_vllm_model
from support.decoders import make_model
from vllm.config import CacheConfig, CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from megatron_sb.huggingface import StickBreakingForCausalLM

BLOCK, LENGTH = 16, 40
STEPS = [(0, 20), (20, 33), *((end - 1, end) for end in range(34, LENGTH + 1))]  # a prompt in two chunks, and tokens


def make_vllm_model(reference: StickBreakingForCausalLM, config: VllmConfig) -> torch.nn.Module:
    """Return vLLM's model with the weights of the model of transformers, and empty caches."""
    model = megatron_sb_vllm_model.StickBreakingForCausalLM(vllm_config=config)
    missing = {name for name, _ in model.named_parameters()} - model.load_weights(reference.state_dict().items())
    if missing:
        raise RuntimeError(f"Weights that were not loaded: {sorted(missing)}")
    for module in model.modules():
        if hasattr(module, "quant_method"):
            module.cpu_linear = torch.nn.functional.linear
    for layer in config.compilation_config.static_forward_context.values():
        columns = layer.head_size + layer.head_size_v
        shape = (LENGTH // BLOCK + 2, BLOCK, layer.num_kv_heads, columns)  # in the order in memory
        layer.kv_cache = torch.full(shape, torch.nan).transpose(1, 2)
    return model


def step_metadata(begin: int, end: int) -> megatron_sb_vllm.StickBreakingMetadata:
    """Return the metadata of a step of one request with the tokens from `begin` to `end`, after older ones."""
    starts, lengths = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=1,
        num_actual_tokens=end - begin,
        max_query_len=end - begin,
        max_seq_len=end,
        block_table_tensor=torch.arange(1, LENGTH // BLOCK + 2, dtype=torch.int32)[None],
        slot_mapping=torch.arange(begin, end) + BLOCK,
        seq_lens_cpu_upper_bound=lengths,
    )
    spec, config = SimpleNamespace(block_size=BLOCK), SimpleNamespace(speculative_config=None)
    return megatron_sb_vllm.StickBreakingMetadataBuilder(spec, ["layer"], config, torch.device("cpu")).build(0, common)


def error_of_logits(reference: StickBreakingForCausalLM, model: torch.nn.Module, config: VllmConfig) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    tokens = torch.randint(reference.config.vocab_size, (LENGTH,))
    logits = []
    for begin, end in STEPS:
        metadata = dict.fromkeys(config.compilation_config.static_forward_context, step_metadata(begin, end))
        with set_forward_context(metadata, config):
            states = model(tokens[begin:end], torch.arange(begin, end))
        logits.append(model.compute_logits(states))
    exact = reference(tokens[None]).logits[0]
    return float((torch.cat(logits) - exact).abs().max() / exact.abs().max())


@torch.no_grad()
def main(out: Path, options: dict) -> None:
    """Compare the models, and write the error or the message."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reference = make_model(**support.vllm_cpu.SIZES, **options)
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"], mode=0))
    config.cache_config = CacheConfig(block_size=BLOCK)
    config.model_config = SimpleNamespace(
        hf_config=reference.config,
        hf_text_config=reference.config,
        dtype=torch.float32,
        head_dtype=torch.float32,
        is_mm_prefix_lm=False,
        is_moe=False,
        logits_processors=None,
    )
    config.parallel_config.tensor_parallel_size = ranks
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, "env://", rank, backend="gloo")
        initialize_model_parallel(ranks)
        try:
            model = make_vllm_model(reference, config)
            found = {"error": error_of_logits(reference, model, config)}
        except ValueError as error:
            found = {"refused": str(error)}
    if rank == 0:
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
