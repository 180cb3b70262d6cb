"""Generate tokens with vLLM's engine and the model of this project on a CPU, and write whether transformers agrees.

`vllm_engine.py OUT.json OPTIONS`. OPTIONS: those of the configuration, as JSON. Prompts are computed in steps of at
most 64 tokens, then again from the prefix cache.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "examples/vllm"))
import support.vllm_cpu  # noqa: I001  # before vLLM's layers
import megatron_sb_vllm
import torch
import vllm
from support.decoders import make_model

TOKENS = 10  # that are generated
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),  # vLLM imports the model in a process of its own
}


@torch.no_grad()
def main(out: Path, options: dict) -> None:
    """Generate with both, and write the tokens of vLLM, those of transformers, and what came from the cache."""
    os.environ.update(ENVIRONMENT)
    library, folder = support.vllm_cpu.define_functions(), out.with_name("model")
    megatron_sb_vllm.register()
    model = make_model(**support.vllm_cpu.SIZES, max_position_embeddings=512, **options)
    model.save_pretrained(folder)
    prompts = [torch.randint(model.config.vocab_size, (length,)) for length in (5, 40, 100)]
    wanted = [
        model.generate(prompt[None], do_sample=False, max_new_tokens=TOKENS)[0, len(prompt) :] for prompt in prompts
    ]
    engine = vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=64,
        block_size=16,
        enable_chunked_prefill=True,
        enforce_eager=True,
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
    runs = [engine.generate(given, sampling) for _ in range(2)]
    found = {
        "tokens": [[list(output.outputs[0].token_ids) for output in outputs] for outputs in runs],
        "wanted": [tokens.tolist() for tokens in wanted],
        "cached": runs[1][-1].num_cached_tokens,
    }
    out.write_text(json.dumps(found))
    del library


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
