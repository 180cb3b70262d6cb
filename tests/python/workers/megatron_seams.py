"""Check launch.py and stand_ins.py in built models, and write the findings as JSON.

Runs on N ranks: `megatron_seams.py OUT.json cpu|cuda`. Experts are distributed over all N ranks.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import rms_norm

from megatron_sb.megatron import StickBreakingOptions, install_stand_ins, launch, with_stickbreaking

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.launch import end_worker, new_folder
from support.megatron_cpu import answer_for_gpu, config_of_virtual_stages, message, small_config

VOCAB_SIZE = 32
NUM_EXPERTS = 4
EXPERTS = {
    "num_moe_experts": NUM_EXPERTS,
    "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}
LAUNCHED = {"attend_current": True, "layers": (0, 1)}
# Options of a script's own specs under the launcher with the options LAUNCHED.
OWN_OPTIONS = {"defaults": {}, "the same": {**LAUNCHED, "layers": [0, 1]}, "another": {"remainder_bias": True}}


def make_model(spec, device: str, position_embedding_type: str = "none", **changes) -> GPTModel:
    """Build a GPTModel from a spec, or from a function of the config, with a context of 32 tokens."""
    torch.manual_seed(3)
    config = small_config(**changes)
    spec = spec(config) if callable(spec) and not isinstance(spec, ModuleSpec) else spec
    return GPTModel(config, spec, VOCAB_SIZE, 32, position_embedding_type=position_embedding_type).to(device)


def block_spec(config):
    """Make the block spec of a mixture of experts, as pretrain_gpt.py does."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=None)


def forward(model: GPTModel) -> torch.Tensor:
    """Return logits of 32 tokens. Only Megatron's softmax attention reads the mask. Megatron creates it on a GPU."""
    positions = torch.arange(32, device=next(model.parameters()).device)[None]
    later = positions[:, None, :, None] < positions[:, None, None, :]
    return model(positions * 7 % VOCAB_SIZE, positions, later).detach()


def layer_outputs(model: GPTModel) -> list[torch.Tensor]:
    """Return the output of every layer."""
    outputs = []
    hooks = [
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0].detach()))
        for layer in model.decoder.layers
    ]
    forward(model)
    for hook in hooks:
        hook.remove()
    return outputs


def mixed_layers() -> dict:
    """Return findings about a model with a stick-breaking layer followed by a softmax layer."""
    spec = with_stickbreaking(get_gpt_layer_local_spec(), layers=(1, 0))
    plain = make_model(spec, "cpu")
    rope = make_model(spec, "cpu", "rope", no_rope_freq=[1, 0])
    all_stick_breaking = make_model(with_stickbreaking(get_gpt_layer_local_spec()), "cpu")
    outputs, with_rope, others = (layer_outputs(model) for model in (plain, rope, all_stick_breaking))
    return {
        "cores": [type(layer.self_attention.core_attention).__name__ for layer in plain.decoder.layers],
        "rope in layer": [(a - b).abs().max().item() for a, b in zip(outputs, with_rope, strict=True)],
        "softmax in layer": [(a - b).abs().max().item() for a, b in zip(outputs, others, strict=True)],
        "refused": {
            "rope": message(lambda: layer_outputs(make_model(spec, "cpu", "rope"))),
            "rope in the other layer": message(
                lambda: layer_outputs(make_model(spec, "cpu", "rope", no_rope_freq=[0, 1]))
            ),
            "three layers": message(lambda: make_model(spec, "cpu", num_layers=3)),
            "multi-token prediction": message(lambda: make_model(spec, "cpu", mtp_num_layers=1)),
        },
    }


def virtual_pipeline() -> list[list[tuple[int, str]]]:
    """Return layers and core attentions of a mixed model on two ranks. Each rank has two stages of one layer."""
    config = config_of_virtual_stages()
    found = {}
    for stage in range(2):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        spec = with_stickbreaking(spec, layers=(1, 0, 0, 1))
        model = GPTModel(
            config,
            spec,
            VOCAB_SIZE,
            32,
            pre_process=(dist.get_rank(), stage) == (0, 0),
            post_process=(dist.get_rank(), stage) == (1, 1),
            position_embedding_type="none",
            vp_stage=stage,
        )
        for layer in model.decoder.layers:
            found[layer.layer_number] = type(layer.self_attention.core_attention).__name__
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return [sorted(layers.items()) for layers in everyone]


def launched_models() -> dict:
    """Return findings about models of Megatron's own specs after `launch.replace_core_attention`."""
    options = LAUNCHED
    specs = {"dense": lambda config: get_gpt_layer_local_spec(), "experts": block_spec}
    changes = {"dense": {}, "experts": EXPERTS | {"moe_token_dispatcher_type": "allgather"}}

    def logits(make_spec, kind: str) -> torch.Tensor:
        return forward(make_model(make_spec, "cpu", **changes[kind]))

    stock = {kind: logits(specs[kind], kind) for kind in specs}
    wanted = {
        kind: logits(lambda config, kind=kind: with_stickbreaking(specs[kind](config), **options), kind)
        for kind in specs
    }
    unpatched = TransformerLayer.__init__
    launch.replace_core_attention(StickBreakingOptions(**options))
    found = {kind: logits(specs[kind], kind) for kind in specs}
    without = get_gpt_layer_local_spec()
    without.submodules.self_attention = IdentityOp
    report = {
        "difference from with_stickbreaking": {kind: (found[kind] - wanted[kind]).abs().max().item() for kind in specs},
        "difference from softmax": {kind: (found[kind] - stock[kind]).abs().max().item() for kind in specs},
        "layer without attention": type(make_model(without, "cpu").decoder.layers[0].self_attention).__name__,
        "own options": {
            name: message(lambda own=own: make_model(with_stickbreaking(get_gpt_layer_local_spec(), **own), "cpu"))
            for name, own in OWN_OPTIONS.items()
        },
    }
    TransformerLayer.__init__ = unpatched
    return report


class LayerNormColumns(ColumnParallelLinear):
    """A projection that contains the norm of its input, as Transformer Engine's, which has no CPU kernels."""

    def __init__(self, input_size, *args, config, **kwargs):
        super().__init__(input_size, *args, config=config, **kwargs)
        self.normalization, self.zero_centered_gamma, self.eps = "RMSNorm", False, config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.linspace(0.5, 2.0, input_size))

    def forward(self, hidden_states, *args, **kwargs):
        """Normalise and project."""
        hidden_states = rms_norm(hidden_states, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return super().forward(hidden_states, *args, **kwargs)


class Adapter(torch.nn.Module):
    """What an adapter puts in the place of a projection. It adds nothing here."""

    def __init__(self, to_wrap: torch.nn.Module):
        super().__init__()
        self.to_wrap = to_wrap

    def forward(self, *args, **kwargs):
        """Project without a change."""
        return self.to_wrap(*args, **kwargs)


def change_by_adapters() -> float:
    """Return how much the logits of a model with gates change if adapters wrap projections that contain norms."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = IdentityOp
    spec.submodules.self_attention.submodules.linear_qkv = LayerNormColumns
    model = make_model(with_stickbreaking(spec, forget_gate=True), "cpu")
    before = forward(model)
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv = Adapter(layer.self_attention.linear_qkv)
    return (forward(model) - before).abs().max().item()


def make_experts_model(device: str, dispatcher: str, grouped: bool, **changes) -> GPTModel:
    """Build two layers of experts, distributed over all ranks."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return make_model(
        lambda config: with_stickbreaking(block_spec(config)),
        device,
        **EXPERTS | changes,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=grouped,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        bf16=device == "cuda",
        params_dtype=dtype,
    ).to(dtype)


def oracle(experts, rows, counts, probs, weights) -> list[torch.Tensor]:
    """Return the output in float64, and the gradients of sum(output * weights) for rows, probs and all matrices."""
    matrices = [parameter.detach().double().requires_grad_() for parameter in experts.parameters()]
    rows, probs = rows.detach().double().requires_grad_(), probs.detach().double().requires_grad_()
    out, first = [], 0
    for count, inner, outer in zip(counts, matrices[::2], matrices[1::2], strict=True):
        gate, up = (rows[first : first + count] @ inner.T).chunk(2, dim=1)
        out.append((gate / (1 + (-gate).exp()) * up * probs[first : first + count, None]) @ outer.T)
        first += count
    out = torch.cat(out)
    return [out, *torch.autograd.grad((out * weights).sum(), [rows, probs, *matrices])]


def grouped_experts(device: str) -> dict:
    """Compare `GroupedExperts` with the oracle, with an expert that has no rows, and with no rows at all."""
    model = make_experts_model(device, "allgather", grouped=True)
    experts = model.decoder.layers[0].mlp.experts
    errors = {}
    for name, counts in {"rows": [5, 0, 17, 2], "no rows": [0, 0, 0, 0]}.items():
        counts = counts[: experts.num_local_experts]
        generator = torch.Generator(device).manual_seed(1)
        like = {"device": device, "dtype": next(experts.parameters()).dtype}
        rows = torch.randn(sum(counts), 32, generator=generator, **like).requires_grad_()
        probs = torch.rand(sum(counts), generator=generator, device=device).requires_grad_()
        weights = torch.randn(sum(counts), 32, generator=generator, **like)
        out, bias = experts(rows, torch.tensor(counts), probs)
        found = [out, *torch.autograd.grad((out * weights).sum(), [rows, probs, *experts.parameters()])]
        wanted = oracle(experts, rows, counts, probs, weights.double())
        assert bias is None and [x.shape for x in found] == [x.shape for x in wanted]
        error = [(a.double() - b).norm() / b.norm().clamp(min=1e-3) for a, b in zip(found, wanted, strict=True)]
        errors[name] = torch.stack(error).max().item()
    refused = message(lambda: make_experts_model(device, "allgather", grouped=True, moe_ffn_hidden_size=44))
    return {"class": type(experts).__name__, "errors": errors, "refused": refused}


def moe_models(device: str) -> dict[str, float]:
    """Return the largest difference in logits between grouped and sequential experts, by dispatcher."""
    differences = {}
    for dispatcher in ("allgather", "alltoall") if device == "cuda" else ("allgather",):
        grouped, sequential = (make_experts_model(device, dispatcher, grouped) for grouped in (True, False))
        sequential.load_state_dict(grouped.state_dict())
        logits = [forward(model).float() for model in (grouped, sequential)]
        differences[dispatcher] = ((logits[0] - logits[1]).norm() / logits[1].norm()).item()
    return differences


def resharded_checkpoint(device: str, folder: Path) -> dict[str, float]:
    """Compare logits of grouped experts on all ranks with those of models that load their checkpoint."""
    saved = make_experts_model(device, "allgather", grouped=True)
    with torch.no_grad():
        for name, parameter in saved.named_parameters():
            if "local_experts" in name:  # make the saved weights differ from initial ones
                parameter.mul_(1.5)
    wanted = forward(saved)
    dist_checkpointing.save(saved.sharded_state_dict(), str(folder))
    differences = {}
    for name, ranks, grouped in (
        ("as it was", dist.get_world_size(), True),
        ("one rank", 1, True),
        ("sequential", 1, False),
    ):
        initialize(ranks)
        model = make_experts_model(device, "allgather", grouped)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))
        differences[name] = (forward(model) - wanted).abs().max().item()
    return differences


def mixed_checkpoint(folder: Path) -> float:
    """Return the difference in logits after loading a checkpoint. The layers of the model have different parameters."""
    spec = with_stickbreaking(get_gpt_layer_local_spec(), layers=(0, 1), remainder_bias=True)
    saved, loaded = (make_model(spec, "cpu") for _ in range(2))
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.01)
    dist_checkpointing.save(saved.sharded_state_dict(), str(folder))
    loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), str(folder)))
    return (forward(saved) - forward(loaded)).abs().max().item()


def initialize(expert_ranks: int) -> None:
    """Initialise Megatron's groups with experts over `expert_ranks` ranks."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_ranks, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )


def main(out: str, device: str) -> None:
    """Run all checks and write their findings."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    initialize(dist.get_world_size())
    findings = {}
    if device == "cuda":
        model_parallel_cuda_manual_seed(1)
        install_stand_ins()
    else:
        answer_for_gpu()
        findings |= {"mixed": mixed_layers(), "launched": launched_models(), "adapters": change_by_adapters()}
        findings["mixed checkpoint"] = mixed_checkpoint(new_folder(Path(out).parent / "mixed"))
        findings["virtual pipeline"] = virtual_pipeline()
        initialize(dist.get_world_size())
    findings |= {"experts": grouped_experts(device), "models": moe_models(device)}
    findings["checkpoint"] = resharded_checkpoint(device, new_folder(Path(out).parent / "experts"))
    end_worker(out, findings)


if __name__ == "__main__":
    main(*sys.argv[1:])
