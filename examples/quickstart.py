"""Train two toy language models, one with stick-breaking attention and one with softmax, and draw what they learned.

Letters and digits alternate in a sequence. Each letter keeps its digit until the digit changes at random, so the best
guess for the next digit is the previous digit of the same letter. Both models train on short sequences and are then
scored on longer ones. The script writes `likelihood_by_length.png`, `attention.png` and `results.json` to
`runs/quickstart`, or to the folder of `--out`. It takes less than two minutes on two CPU cores.

python examples/quickstart.py
"""

# %% Imports and settings
import argparse
import json
import time
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import megatron_sb as sb
from megatron_sb.baselines.softmax import SoftmaxAttention

NUM_LETTERS, NUM_DIGITS, CHANGE = 8, 8, 0.1
VOCABULARY = [chr(ord("a") + i) for i in range(NUM_LETTERS)] + [str(i) for i in range(NUM_DIGITS)]
HIDDEN, HEADS, LAYERS = 64, 2, 2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600, help="training steps of each model (default: %(default)s)")
parser.add_argument("--batch", type=int, default=32, help="sequences in a step (default: %(default)s)")
parser.add_argument("--length", type=int, default=64, help="tokens in a training sequence (default: %(default)s)")
parser.add_argument("--out", default="runs/quickstart", help="output folder (default: %(default)s)")
options = parser.parse_args()
if options.length < 8 or options.length % 8:  # a quarter of it must begin with a letter, too
    parser.error(f"--length must be a multiple of 8, got {options.length}")
for name in ("steps", "batch"):
    if getattr(options, name) < 1:
        parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
if not options.out:  # as of a shell's variable that is not set; Path("") is the current folder
    parser.error("--out must be a folder, got ''")
out = Path(options.out)
try:
    out.mkdir(parents=True, exist_ok=True)
except OSError as error:
    parser.error(f"--out must be a folder that can be created, got {options.out!r}: {error.strerror}")


# %% The data
def make_batch(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw sequences in which letters and digits alternate.

    Returns:
        Tokens (batch, length), int64. Token 2i is a letter, token 2i + 1 its digit.
    """
    letters = torch.randint(NUM_LETTERS, (batch, length // 2), generator=generator)
    drawn = torch.randint(NUM_DIGITS, (batch, length // 2), generator=generator)
    changes = torch.rand(batch, length // 2, generator=generator) < CHANGE
    digits = torch.randint(NUM_DIGITS, (batch, NUM_LETTERS), generator=generator)
    tokens = torch.empty(batch, length, dtype=torch.int64)
    rows = torch.arange(batch)
    for i in range(length // 2):
        letter = letters[:, i]
        digits[rows, letter] = torch.where(changes[:, i], drawn[:, i], digits[rows, letter])
        tokens[:, 2 * i] = letter
        tokens[:, 2 * i + 1] = NUM_LETTERS + digits[rows, letter]
    return tokens


# %% The models: two layers, identical except for the attention
class SoftmaxSelfAttention(nn.Module):
    """Self-attention like `sb.StickBreakingSelfAttention`, with softmax and rotary position embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.attention = SoftmaxAttention(HEADS, HIDDEN // HEADS, position="rope")
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sequence. x: (b, s, hidden) -> (b, s, hidden)."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.qkv_proj(x).chunk(3, dim=-1))
        return self.out_proj(self.attention(q, k, v).flatten(-2))


class Block(nn.Module):
    """Attention and an MLP, each with a norm before and a residual connection around it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)])
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """x: (b, s, hidden) -> (b, s, hidden)."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def make_model(kind: str) -> nn.Module:
    """Build the model with kind "stick-breaking" or "softmax"."""
    torch.manual_seed(0)

    def attention() -> nn.Module:
        return SoftmaxSelfAttention() if kind == "softmax" else sb.StickBreakingSelfAttention(HIDDEN, HEADS)

    blocks = [Block(attention()) for _ in range(LAYERS)]
    return nn.Sequential(
        nn.Embedding(len(VOCABULARY), HIDDEN), *blocks, nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, len(VOCABULARY))
    )


def digit_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the negative log-likelihood of each digit, in nats: (batch, length / 2)."""
    logits = model(tokens[:, :-1])[:, ::2]
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1::2], reduction="none")


# %% Training
def train(kind: str) -> nn.Module:
    """Train one model. Both models see the same batches."""
    model, generator = make_model(kind), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
    begin = time.monotonic()
    for step in range(options.steps):
        loss = digit_losses(model, make_batch(options.batch, options.length, generator)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == options.steps - 1:
            print(f"{kind:>14}, step {step:4d}: {loss.item():.3f} nats, {time.monotonic() - begin:.0f} s", flush=True)
    return model


models = {kind: train(kind) for kind in ("stick-breaking", "softmax")}


# %% Likelihood by length: the loss of the last eight digits of a sequence, with longer and longer contexts
lengths = [options.length * factor // 4 for factor in (1, 2, 4, 8, 16, 32)]
held_out = make_batch(16, lengths[-1], torch.Generator().manual_seed(2))
results: dict[str, list[float]] = {}
for kind, model in models.items():
    with torch.no_grad():
        results[kind] = [digit_losses(model, held_out[:, -n:])[:, -8:].mean().item() for n in lengths]
(out / "results.json").write_text(json.dumps({"lengths": lengths, **results}, indent=2) + "\n")
print("context        ", *(f"{n:6d}" for n in lengths))
for kind, losses in results.items():
    print(f"{kind:15}", *(f"{loss:6.3f}" for loss in losses))

figure, axes = plt.subplots(figsize=(5, 3.5))
for kind, losses in results.items():
    axes.plot(lengths, losses, marker="o", label=kind)
axes.axvline(options.length, color="gray", linestyle=":", label="training length")
axes.set(xscale="log", xlabel="context (tokens)", ylabel="negative log-likelihood (nats per digit)")
axes.set_xticks(lengths, [str(n) for n in lengths], minor=False)
axes.minorticks_off()
axes.legend()
figure.savefig(out / "likelihood_by_length.png", dpi=120, bbox_inches="tight")


# %% The attention: the weights of the last layer on one short sequence
def weights_of(kind: str, x: Tensor) -> Tensor:
    """Return the attention weights of the last layer, (heads, queries, keys).

    With the columns of the identity matrix as values, the output of the attention is the matrix of weights.
    """
    model = models[kind]
    block = model[LAYERS]
    for layer in model[:LAYERS]:
        x = layer(x)
    x = block.norms[0](x)
    q, k, _ = (part.unflatten(-1, (HEADS, -1)) for part in block.attention.qkv_proj(x).chunk(3, dim=-1))
    length = x.shape[1]
    columns = torch.eye(length).view(1, length, 1, length).expand(1, length, HEADS, length)
    attend = sb.stickbreaking_attention if kind == "stick-breaking" else block.attention.attention
    size = HIDDEN // HEADS
    weights = [attend(q, k, part.contiguous()) for part in columns.split(size, dim=-1)]
    return torch.cat(weights, dim=-1)[0].transpose(0, 1)


shown = make_batch(1, 32, torch.Generator().manual_seed(3))
text = [VOCABULARY[token] for token in shown[0]]
figure, grid = plt.subplots(len(models), HEADS, figsize=(5 * HEADS, 5 * len(models)), squeeze=False)
for row, kind in zip(grid, models, strict=True):
    with torch.no_grad():
        weights = weights_of(kind, shown)
    for head, axes in enumerate(row):
        axes.imshow(weights[head], vmin=0, vmax=1, cmap="Blues")
        axes.set(title=f"{kind}, last layer, head {head}", xlabel="key", ylabel="query")
        axes.set_xticks(range(len(text)), text, fontsize=6)
        axes.set_yticks(range(len(text)), text, fontsize=6)
figure.savefig(out / "attention.png", dpi=120, bbox_inches="tight")
print(f"see {out}/likelihood_by_length.png and {out}/attention.png")
