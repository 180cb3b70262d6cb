"""Compare stick-breaking attention with its naive PyTorch version and with torch's softmax attention.

There are two kinds of inputs, because stick-breaking attention skips keys once the mass is small. In `full`, logits are
near -11 and nothing can be skipped. In `randn`, q and k are standard normal, as at initialisation. At each length the
functions take turns in one process, and the medians are printed. Peak memory is the memory of outputs, gradients and
workspace, without the inputs. It is measured in a fresh process, after a short call that loads libraries and starts
threads: resident memory on a CPU, allocated memory on a GPU.
"""

import argparse
import contextlib
import datetime
import importlib
import math
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from megatron_sb.ops import stickbreaking_attention
from megatron_sb.options import head_dim_problem
from megatron_sb.processes import module_command
from megatron_sb.validation import InputError, check_output_folder, naming

_FULL_LOGIT = -11.0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MEMORY_TIMEOUT_S = 1800
_LARGEST = 2**63 - 1  # of a size in torch
_WARM_LENGTH = 64  # of the call before the memory is measured
_TOO_LARGE = ("out of memory", "can't allocate memory", "size calculation overflowed")  # in errors of torch


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute stick-breaking attention in log space, with all weights in memory. q, k, v and result: (b, s, h, d)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu()
    log_rest = logsigmoid(-z).masked_fill(hidden, 0.0)
    log_newer = log_rest.flip(-1).cumsum(-1).flip(-1) - log_rest
    weights = (logsigmoid(z) + log_newer).masked_fill(hidden, -torch.inf).exp()
    return (weights @ v).transpose(1, 2)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute torch's causal softmax attention. q, k, v and result: (b, s, h, d)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@contextlib.contextmanager
def _naming_length(option: str, length: int) -> Iterator[None]:
    """Raise ValueError in place of torch's error if the tensors of a length do not fit the memory."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _TOO_LARGE):
            raise
        raise _too_long(option, length, str(error)) from error


def _too_long(option: str, length: int, cause: str) -> InputError:
    first_line = cause.strip().splitlines()[0].rstrip(".")
    return InputError(
        f"{option} must be a length whose tensors fit the memory, got {length} ({first_line}). Use a smaller one, or "
        "a smaller --batch or --heads. --naive-max-length can leave out the naive version."
    )


def make_inputs(kind: str, length: int, options: argparse.Namespace) -> list[Tensor]:
    """Return q, k and v, which require gradients, and dO, each (b, length, h, d). kind: "full" or "randn"."""
    generator = torch.Generator().manual_seed(length)
    shape = (options.batch, length, options.heads, options.head_dim)
    q, k, v, do = (torch.randn(shape, generator=generator) for _ in range(4))
    if kind == "full":
        q[..., 0] = math.sqrt(-_FULL_LOGIT) * options.head_dim**0.25
        k[..., 0] = -q[..., 0]
    q, k, v, do = (x.to(options.device, _DTYPES[options.dtype]) for x in (q, k, v, do))
    return [*(x.requires_grad_() for x in (q, k, v)), do]


def forward_backward(attention: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Run one forward and one backward pass and drop the gradients."""
    q, k, v, do = inputs
    torch.autograd.grad(attention(q, k, v), (q, k, v), do)


def time_in_turns(attentions: list[Callable[..., Tensor]], inputs: list[Tensor], repeats: int) -> list[float]:
    """Return the median time of forward and backward for each function, in ms. Each one is warmed up once."""
    samples: list[list[float]] = [[] for _ in attentions]
    for repeat in range(repeats + 1):
        for attention, taken in zip(attentions, samples, strict=True):
            elapsed = _time_once(attention, inputs)
            if repeat > 0:
                taken.append(elapsed)
    return [statistics.median(taken) for taken in samples]


def _time_once(attention: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    if inputs[0].is_cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        forward_backward(attention, inputs)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    start_s = time.perf_counter()
    forward_backward(attention, inputs)
    return (time.perf_counter() - start_s) * 1e3


def peak_memory(attention: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Return the peak bytes of forward and backward above the bytes in use now.

    On a CPU, call it in a fresh process: an earlier, higher peak of the process would make the result too high.
    """
    if inputs[0].is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward_backward(attention, inputs)
        return torch.cuda.max_memory_allocated() - before
    resident = _resident_bytes("VmRSS")
    forward_backward(attention, inputs)
    return _resident_bytes("VmHWM") - resident


def _resident_bytes(field: str) -> int:
    """Return VmRSS, the resident memory now, or VmHWM, its peak.

    getrusage is not used, because its peak starts at the peak of the parent process.
    """
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_memory_in_fresh_process(kind: str, length: int, options: argparse.Namespace) -> int:
    """Return the peak bytes of stick-breaking attention above its inputs, measured in a new process."""
    command = [*module_command("megatron_sb.bench"), "--memory-worker", kind, "--memory-length", str(length)]
    for name in ("device", "dtype", "batch", "heads", "head_dim"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEMORY_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"--memory-length must be a length that takes at most {_MEMORY_TIMEOUT_S} s, got {length}. Use a smaller "
            "one, or 0 to leave out this measurement."
        ) from None
    if done.returncode == -signal.SIGKILL:
        raise _too_long("--memory-length", length, "the system killed the process")
    if cause := next((line for line in done.stderr.splitlines() if any(words in line for words in _TOO_LARGE)), None):
        raise _too_long("--memory-length", length, cause.partition(": ")[2])
    if done.returncode != 0:
        raise RuntimeError(f"The memory measurement ended with status {done.returncode}:\n{done.stderr}")
    return int(done.stdout)


def _memory_of_worker(options: argparse.Namespace) -> int:
    """Return the peak bytes of stick-breaking attention above its inputs, in a process without other calls.

    The first call of a process also loads code and starts threads: 35 MiB, which a small call before takes.
    """
    kind, length = options.memory_worker, options.memory_length
    forward_backward(stickbreaking_attention, make_inputs(kind, min(_WARM_LENGTH, length), options))
    return peak_memory(stickbreaking_attention, make_inputs(kind, length, options))


def run(options: argparse.Namespace) -> None:
    """Print the table and the peak memory, and draw the plot if a folder is given."""
    print(_heading(options))
    print("forward + backward, median ms      |          full          |    randn")
    print("   length    softmax      naive    |       ours  naive/ours |       ours", flush=True)
    rows = []
    for length in options.lengths:
        contenders = [stickbreaking_attention, softmax_attention]
        if length <= options.naive_max_length:
            contenders.append(naive_attention)
        with _naming_length("--lengths", length):
            full, softmax, *naive = time_in_turns(contenders, make_inputs("full", length, options), options.repeats)
            (randn,) = time_in_turns([stickbreaking_attention], make_inputs("randn", length, options), options.repeats)
        rows.append({"length": length, "softmax": softmax, "ours, full": full, "ours, randn": randn})
        shown = (f"{'-':>10}", f"{'-':>11}")
        if naive:
            rows[-1]["naive"] = naive[0]
            shown = (f"{naive[0]:>10.2f}", f"{naive[0] / full:>10.2f}x")
        print(f"{length:>9} {softmax:>10.2f} {shown[0]}    | {full:>10.2f} {shown[1]} | {randn:>10.2f}", flush=True)
    if options.out:
        print(f"plot: {_plot(rows, options)}", flush=True)
    if options.memory_length:
        peak = peak_memory_in_fresh_process("full", options.memory_length, options)
        print(f"peak memory over the inputs at length {options.memory_length}: {peak / 2**20:.0f} MiB", flush=True)


def _heading(options: argparse.Namespace) -> str:
    where = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    if options.device == "cuda":
        where = torch.cuda.get_device_name()
    shape = f"b={options.batch} h={options.heads} d={options.head_dim} {options.dtype} causal"
    return f"{datetime.date.today()}, {options.device} ({where}), torch {torch.__version__}, {shape}"


def _plot(rows: list[dict[str, float]], options: argparse.Namespace) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name in ("naive", "ours, full", "ours, randn", "softmax"):
        measured = [row for row in rows if name in row]
        axes.loglog([row["length"] for row in measured], [row[name] for row in measured], marker="o", label=name)
    axes.set(xlabel="length", ylabel="forward + backward, ms", title=_heading(options))
    axes.title.set_fontsize(8)
    axes.set_xticks(options.lengths, labels=[str(length) for length in options.lengths])
    axes.set_xticks([], minor=True)
    axes.legend()
    axes.grid(True, which="both", alpha=0.3)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"bench_{options.device}.png"
    with naming(path):
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="megatron-sb bench", description=__doc__.partition("\n")[0])
    has_cuda = torch.cuda.is_available()

    def add(name: str, default: object, about: str, **kwargs) -> None:
        parser.add_argument(name, default=default, help=f"{about} (default: %(default)s)", **kwargs)

    add("--device", "cuda" if has_cuda else "cpu", "device to measure", choices=("cpu", "cuda"))
    add("--dtype", "bf16" if has_cuda else "fp32", "dtype of q, k and v", choices=tuple(_DTYPES))
    add("--batch", 1, "number of sequences", type=int)
    add("--heads", 8, "heads of q, k and v", type=int)
    add("--head-dim", 64, "channels of a head", type=int)
    add("--lengths", [512, 1024, 2048, 4096], "sequence lengths in tokens", type=int, nargs="+")
    add("--naive-max-length", 2048, "longest length for the naive version", type=int)
    add("--repeats", 5, "timed runs; their median is printed", type=int)
    add("--memory-length", 32768, "length at which peak memory is measured; 0 disables this", type=int)
    parser.add_argument("--out", help="folder for a plot (default: no plot)")
    parser.add_argument("--memory-worker", choices=("full", "randn"), help=argparse.SUPPRESS)
    return parser


def _parse(args: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    options = parser.parse_args(args)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu, got cuda: torch finds no CUDA device.")
    numbers = {name: getattr(options, name) for name in ("batch", "heads", "head_dim", "repeats")}
    for name, number in {**numbers, "lengths": min(options.lengths)}.items():
        if number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {number}.")
    numbers |= {"lengths": max(options.lengths), "memory_length": options.memory_length}
    for name, number in numbers.items():
        if number > _LARGEST:
            parser.error(f"--{name.replace('_', '-')} must be at most {_LARGEST}, got {number}.")
    if problem := head_dim_problem("--head-dim", options.head_dim):
        parser.error(f"{problem}.")
    if options.memory_length < 0:
        parser.error(f"--memory-length must be at least 0, got {options.memory_length}.")
    if options.out == "":  # as of a shell's variable that is not set
        parser.error("--out must be a folder, got ''.")
    options.out = options.out and Path(options.out)
    return options


def main(args: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status. args: command line arguments. Default: those of the process."""
    options = _parse(args)
    if options.out:  # errors come before anything is measured
        importlib.import_module("matplotlib")
        check_output_folder("--out", options.out)
    if options.memory_worker:
        print(_memory_of_worker(options))
    else:
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
