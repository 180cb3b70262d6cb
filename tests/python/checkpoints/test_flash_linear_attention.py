"""flash-linear-attention's own code runs a converted model. Its logits match ours within the rounding of bf16."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_sb import checkpoints
from megatron_sb.huggingface import StickBreakingConfig, StickBreakingForCausalLM


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [{}, {"num_key_value_heads": 2, "tie_word_embeddings": True}, {"qkv_bias": True}],
    ids=["mha", "gqa, tied", "biases"],
)
def test_the_same_logits(fields, tmp_path):
    """Its kernels and modules are as close to float32 as ours."""
    pytest.importorskip("fla.models.stickbreaking_attn", reason="needs flash-linear-attention")
    torch.manual_seed(1)
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = StickBreakingConfig(**sizes, num_attention_heads=8, rms_norm_eps=1e-6, initializer_range=0.05, **fields)
    exact = StickBreakingForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.normal_(std=0.5)
    exact = exact.cuda().bfloat16()
    checkpoints.save(exact, tmp_path / "fla", "fla")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "fla", dtype=torch.bfloat16).eval().cuda()
    assert type(theirs).__module__.startswith("fla.")
    ours = checkpoints.load(tmp_path / "fla").cuda()
    exact = exact.float()
    ids = torch.randint(512, (2, 700), device="cuda")
    with torch.no_grad():
        expected, found, of_theirs = (model(ids).logits.float() for model in (exact, ours, theirs))
    spread = expected.std()
    assert (found - expected).std() < 0.02 * spread
    assert (found - of_theirs).std() < 0.03 * spread
    assert (found - of_theirs).std() < 3 * (of_theirs - expected).std()
