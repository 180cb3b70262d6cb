"""Megatron-LM's unmodified scripts with Transformer Engine under the launcher, on one and two GPUs.

MEGATRON_LM names a checkout of Megatron-LM. Each case trains a small model for ten steps on Megatron's mock data. The
losses of most cases must be those of another case, for example of the same model without recomputation. Jobs that are
killed while they save must have the losses of a job that never stopped.
"""

import dataclasses
import functools
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from support.jobs import kill_while
from support.launch import megatron_losses
from support.megatron_loop import is_saving_another, newest, started_on_gpus

MEGATRON_LM = os.environ.get("MEGATRON_LM")
HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
STEPS, ROWS, INTERVAL = 10, 4, 2  # INTERVAL: of the saves of jobs that are killed
LIMIT_SECONDS = 300  # of a run
ROUNDING = 2e-2  # of losses in bf16
SAME = 1e-3  # of losses in the same layout
OF_FP8 = 0.15

MODEL = f"""
--num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --swiglu --disable-bias-linear
--normalization RMSNorm --untie-embeddings-and-output-weights --seq-length 512 --max-position-embeddings 512
--micro-batch-size 1 --global-batch-size {ROWS} --train-iters {STEPS} --lr 2e-3 --lr-decay-style constant
--make-vocab-size-divisible-by 128 --bf16 --use-distributed-optimizer --use-cpu-initialization --seed 1234
--attention-dropout 0 --hidden-dropout 0 --position-embedding-type none --no-gradient-accumulation-fusion
--no-create-attention-mask-in-dataloader --num-workers 0
--log-interval 1 --eval-iters 0 --eval-interval 1000
"""
MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127"
STICKS = "--stick-breaking-attention"
LOCAL = "--transformer-impl local --no-rope-fusion"
LEARNED = "--sb-forget-gate --sb-remainder-bias --sb-head-norm"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 256 --moe-router-topk 2 --moe-aux-loss-coeff 0 --moe-grouped-gemm"
ALLTOALL = f"{EXPERTS} --moe-token-dispatcher-type alltoall"
LATENT = "--multi-latent-attention --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --no-rope-fusion"
HYBRID = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec --hybrid-layer-pattern"
DOCUMENTS = "--dataloader-inter-document-masking"
CONVERSATIONS = "--sft --sft-tokenizer-prompt-format identity --calculate-per-token-loss"
MAMBA = ("mamba_ssm", "causal_conv1d")
FIXED_TILES = (("MAMBA_DETERMINISTIC", "1"),)  # Mamba's kernels without searching the fastest tiles
ASYNC = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
SHARDED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor"


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of a script.

    Attributes:
        flags: added to MODEL.
        like: the case whose losses are expected. "" expects only that the loss drops.
        tolerance: of the losses.
        ranks: number of GPUs.
        script: in the checkout.
        environment: variables, as pairs.
        saved_by: flags of a run that saves at half of the steps; this run resumes from there.
        conversations: trains on packed conversations instead of the mock data.
        modules: other packages that it needs.
    """

    flags: str
    like: str = ""
    tolerance: float = ROUNDING
    ranks: int = 1
    script: str = "pretrain_gpt.py"
    environment: tuple[tuple[str, str], ...] = ()
    saved_by: str = ""
    conversations: bool = False
    modules: tuple[str, ...] = ()


MANY_QUEUES = (("CUDA_DEVICE_MAX_CONNECTIONS", "32"),)
CASES = {
    "dense": Case(STICKS),
    "without Transformer Engine": Case(f"{STICKS} {LOCAL}", "dense"),
    "gates and head vectors": Case(f"{STICKS} {LEARNED}"),
    "the same without Transformer Engine": Case(f"{STICKS} {LEARNED} {LOCAL}", "gates and head vectors"),
    "grouped heads": Case(f"{STICKS} --group-query-attention --num-query-groups 2"),
    "mixed with softmax": Case(f"{STICKS} --sb-layers ([1,0])*2"),
    "mixed with softmax and RoPE": Case(
        f"{STICKS} --sb-layers ([1,0])*2 --position-embedding-type rope --no-rope-freq ([1,0])*2"
    ),
    "reach": Case(f"{STICKS} --sb-reach 0.5 10"),
    "norms of queries and keys": Case(f"{STICKS} --qk-layernorm"),
    "largest logits": Case(f"{STICKS} --log-max-attention-logit", "dense"),
    "multi-token prediction": Case(f"{STICKS} --mtp-num-layers 1"),
    "latent": Case(f"{STICKS} {LATENT}"),
    "experts, alltoall": Case(f"{STICKS} {ALLTOALL}"),
    "experts, allgather": Case(f"{STICKS} {EXPERTS} --moe-token-dispatcher-type allgather", "experts, alltoall"),
    "fp8, tensorwise": Case(f"{STICKS} --fp8-format hybrid --fp8-recipe tensorwise", "dense", OF_FP8),
    "fp8, delayed": Case(f"{STICKS} --fp8-format hybrid --fp8-recipe delayed", "dense", OF_FP8),
    "fp8, blockwise": Case(f"{STICKS} --fp8-format e4m3 --fp8-recipe blockwise", "dense", OF_FP8),
    "inter-document masking": Case(f"{STICKS} {DOCUMENTS}"),
    "packed conversations": Case(f"{STICKS} {CONVERSATIONS}", conversations=True),
    "recomputed core attention": Case(
        f"{STICKS} --recompute-granularity selective --recompute-modules core_attn", "dense"
    ),
    "recomputed layers": Case(
        f"{STICKS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "dense"
    ),
    "offloaded activations": Case(
        f"{STICKS} --fine-grained-activation-offloading --offload-modules core_attn attn_proj",
        "dense",
        environment=(("NVTE_CPU_OFFLOAD_V1", "1"),),
    ),
    "CUDA graphs of layers": Case(f"{STICKS} --cuda-graph-impl local", "dense"),
    "CUDA graphs of Transformer Engine": Case(
        f"{STICKS} --cuda-graph-impl transformer_engine --cuda-graph-modules attn", "dense"
    ),
    "Megatron-FSDP": Case(f"{STICKS} {SHARDED}", "dense", environment=MANY_QUEUES),
    "overlapped": Case(f"{STICKS} --overlap-grad-reduce --overlap-param-gather", "dense"),
    "resumed": Case(STICKS, "dense", saved_by=STICKS),
    "resumed, async save": Case(STICKS, "dense", saved_by=f"{STICKS} {ASYNC}"),
    "resumed, fully reshardable": Case(f"{STICKS} {RESHARDABLE}", "dense", saved_by=f"{STICKS} {RESHARDABLE}"),
    "hybrid": Case(f"{STICKS} {HYBRID} *-*E {ALLTOALL}", script="pretrain_hybrid.py"),
    "hybrid with Mamba": Case(
        f"{STICKS} {HYBRID} M*M-",
        script="pretrain_hybrid.py",
        environment=FIXED_TILES,
        modules=MAMBA,
    ),
}
TWO = functools.partial(Case, ranks=2)
# Megatron pads the vocabulary to a multiple of the second flag times the tensor-parallel ranks.
TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --sequence-parallel"
ON_TWO_GPUS = {
    "context parallel": TWO(f"{STICKS} --context-parallel-size 2", "dense"),
    "context parallel, p2p": TWO(f"{STICKS} --context-parallel-size 2 --cp-comm-type p2p", "dense"),
    "context parallel, all_gather": TWO(f"{STICKS} --context-parallel-size 2 --cp-comm-type all_gather", "dense"),
    "context parallel, inter-document masking": TWO(
        f"{STICKS} --context-parallel-size 2 {DOCUMENTS}", "inter-document masking"
    ),
    "context parallel, packed conversations": TWO(
        f"{STICKS} --context-parallel-size 2 {CONVERSATIONS}", "packed conversations", conversations=True
    ),
    "context parallel, fp8": TWO(
        f"{STICKS} --context-parallel-size 2 --fp8-format hybrid --fp8-recipe tensorwise", "dense", OF_FP8
    ),
    "context parallel, latent": TWO(f"{STICKS} --context-parallel-size 2 {LATENT}", "latent"),
    "tensor and sequence parallel": TWO(f"{STICKS} {TENSOR_PARALLEL}", "dense"),
    "gates, tensor and sequence parallel": TWO(f"{STICKS} {LEARNED} {TENSOR_PARALLEL}", "gates and head vectors"),
    "pipeline": TWO(f"{STICKS} --pipeline-model-parallel-size 2"),
    "expert parallel, alltoall": TWO(f"{STICKS} {ALLTOALL} --expert-model-parallel-size 2", "experts, alltoall"),
    "expert parallel, overlapped": TWO(
        f"{STICKS} {ALLTOALL} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        "experts, alltoall",
        environment=MANY_QUEUES,
    ),
    "hybrid, context parallel": TWO(
        f"{STICKS} {HYBRID} *-*E {ALLTOALL} --context-parallel-size 2", "hybrid", script="pretrain_hybrid.py"
    ),
    "hybrid, expert parallel": TWO(
        f"{STICKS} {HYBRID} *-*E {ALLTOALL} --expert-model-parallel-size 2", "hybrid", script="pretrain_hybrid.py"
    ),
    "hybrid with Mamba, context parallel": TWO(
        f"{STICKS} {HYBRID} M*M- --context-parallel-size 2",
        "hybrid with Mamba",
        script="pretrain_hybrid.py",
        environment=FIXED_TILES,
        modules=MAMBA,
    ),
    "Megatron-FSDP on two GPUs": TWO(f"{STICKS} {SHARDED}", "dense", environment=MANY_QUEUES),
    "resumed with tensor parallelism": TWO(
        f"{STICKS} {TENSOR_PARALLEL} {RESHARDABLE}",
        "dense",
        saved_by=f"{STICKS} --context-parallel-size 2 {RESHARDABLE}",
    ),
}
ALL_CASES = CASES | ON_TWO_GPUS
# The flags of both jobs, the ranks, and the layout of the job that is killed and of the job that resumes.
KILLED = {
    "synchronous save": ("", 1, "", ""),
    "async save": (ASYNC, 1, "", ""),
    "async save, fully reshardable": (f"{ASYNC} {RESHARDABLE}", 1, "", ""),
    "async save, to tensor parallelism": (f"{ASYNC} {RESHARDABLE}", 2, "--context-parallel-size 2", TENSOR_PARALLEL),
}

pytestmark = [
    pytest.mark.skipif(MEGATRON_LM is None, reason="MEGATRON_LM does not name a checkout of Megatron-LM"),
    pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="Transformer Engine is not installed"),
]


def write_conversations(folder: Path) -> list:
    """Write conversations of numbered words and a tokenizer for them. Return the flags that name both.

    A line holds five conversations, together shorter than a row, so that padding for context parallelism cuts nothing.
    """
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    pytest.importorskip("datasets")  # Megatron reads the lines with it
    words = ["<unk>", "<eos>", *(str(number) for number in range(120))]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(folder / "tokenizer")
    random = np.random.default_rng(0)
    lines = []
    for _ in range(STEPS * ROWS):
        messages = []
        for length in random.integers(20, 90, size=5):
            answer = " ".join(str((length + index) % 120) for index in range(length))
            messages += [
                {"role": "system", "content": "0 "},
                {"role": "user", "content": f"{length} "},
                {"role": "assistant", "content": answer},
            ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "conversations.jsonl").write_text("\n".join(lines))
    data = ["--data-path", folder / "conversations.jsonl", "--split", "100,0,0"]
    return [*data, "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", folder / "tokenizer"]


def flags_of(case: Case, folder: Path) -> list:
    """Return the flags of a case, with its model and data."""
    data = write_conversations(folder) if case.conversations else MOCK_DATA.split()
    return [*MODEL.split(), *data, "--data-cache-path", folder, *case.flags.split()]


def script_of(case: Case) -> Path:
    """Return the training script of a case."""
    return Path(MEGATRON_LM).resolve() / case.script


def train(case: Case, folder: Path) -> list[float]:
    """Run the script, first to half of the steps if the case resumes, and return the losses of the last run."""
    run = functools.partial(
        megatron_losses, script_of(case), case.ranks, device="cuda", environment=dict(case.environment)
    )
    if not case.saved_by:
        return run(*flags_of(case, folder))
    checkpoints = ["--ckpt-format", "torch_dist", "--save-interval", STEPS // 2]
    saving = dataclasses.replace(case, flags=case.saved_by)
    run(*flags_of(saving, folder), *checkpoints, "--save", folder / "saved", "--exit-interval", STEPS // 2)
    return run(*flags_of(case, folder), *checkpoints, "--load", folder / "saved")


def losses_of(name: str, folders: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a case, trained once for all processes of pytest-xdist."""
    shared = folders.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else folders.getbasetemp()
    record = shared / f"{name.replace(' ', '_')}.json"
    with FileLock(f"{record}.lock", timeout=2 * LIMIT_SECONDS):
        if not record.exists():
            record.write_text(json.dumps(train(ALL_CASES[name], folders.mktemp("run"))))
    return json.loads(record.read_text())


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.gpu) for name in CASES),
        *(pytest.param(name, marks=pytest.mark.multigpu) for name in ON_TWO_GPUS),
    ],
)
def test_training(name, tmp_path_factory, record_property):
    """The losses are finite and drop, and are those of the case that this one is compared with."""
    case = ALL_CASES[name]
    for module in case.modules:
        pytest.importorskip(module)
    losses = losses_of(name, tmp_path_factory)
    record_property("losses", losses)
    assert len(losses) == (STEPS // 2 if case.saved_by else STEPS), losses
    assert losses[-1] < losses[0] - (0.02 if case.saved_by else 0.5), losses
    if case.like:
        base = losses_of(case.like, tmp_path_factory)[-len(losses) :]
        record_property("distance", max(abs(a - b) for a, b in zip(losses[2:], base[2:], strict=True)))
        # Megatron logs the mean of the first two losses in the place of the second.
        assert losses[2:] == pytest.approx(base[2:], abs=case.tolerance), (losses, base)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpu if ranks == 1 else pytest.mark.multigpu)
        for name, (_, ranks, *_) in KILLED.items()
    ],
)
def test_a_killed_job_resumes(name, tmp_path_factory, tmp_path, record_property):
    """The second job has the losses of a job that never stopped, and completes the checkpoint that was begun.

    After a resume, the second loss that Megatron logs is the mean of both.
    """
    flags, ranks, first, second = KILLED[name]
    saved = tmp_path / "saved"
    save = ["--ckpt-format", "torch_dist", "--save", saved, "--save-interval", INTERVAL]
    case = Case(f"{STICKS} {flags} {first}", ranks=ranks)
    with started_on_gpus(script_of(case), ranks, *flags_of(case, tmp_path), *save) as job:
        kill_while([job], lambda: is_saving_another(saved))
    step = newest(saved)
    record_property("step", step)
    assert step % INTERVAL == 0 and is_saving_another(saved)

    case = Case(f"{STICKS} {flags} {second}", ranks=ranks)
    resumed = [*flags_of(case, tmp_path), *save, "--load", saved]
    losses = megatron_losses(script_of(case), ranks, *resumed, device="cuda")
    whole = losses_of("dense", tmp_path_factory)[step:]
    whole[1] = (whole[0] + whole[1]) / 2
    record_property("distance", max(abs(a - b) for a, b in zip(losses, whole, strict=True)))
    assert losses == pytest.approx(whole, abs=ROUNDING if second else SAME)
    assert newest(saved) == STEPS and not is_saving_another(saved)


@pytest.mark.gpu
def test_the_flag_replaces_transformer_engines_attention(tmp_path_factory):
    """Without the flag, softmax has other losses."""
    sticks = losses_of("dense", tmp_path_factory)
    softmax = train(Case(""), tmp_path_factory.mktemp("softmax"))
    assert max(abs(a - b) for a, b in zip(sticks, softmax, strict=True)) > ROUNDING
