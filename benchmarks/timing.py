"""Measure GPU work: medians of contenders in turns with a cold L2, back-to-back runs, ceilings, power and clocks.

On a machine without a GPU the same functions measure wall time, so that a benchmark can be tried there.
"""

import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import torch

Call = Callable[[], object]

FACTORS = {"forward": 1.0, "backward": 2.5, "both": 3.5}  # operations of attention, as multiples of the forward's
DRY_RUN_FACTOR = 64  # a try without a GPU divides the lengths by it

_L2_FLUSH_BYTES = 256 * 2**20  # several times the largest L2
_HEAD_START_CYCLES = 2_000_000  # about 1 ms of device time in which the host queues a round
_MATMUL, _COPY_BYTES = 8192, 2**32


def on_gpu() -> bool:
    """Return whether there is a GPU to time."""
    return torch.cuda.is_available()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if on_gpu():
        torch.cuda.synchronize()


class Stopwatch:
    """Measure the time from construction to stop(): the GPU's time, or wall time without a GPU."""

    def __init__(self) -> None:
        if on_gpu():
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._begin.record()
        else:
            self._begin_s = time.perf_counter()

    def stop(self) -> "Stopwatch":
        """End the measurement without waiting for the device."""
        if on_gpu():
            self._end.record()
        else:
            self._elapsed_ms = (time.perf_counter() - self._begin_s) * 1e3
        return self

    def milliseconds(self) -> float:
        """Wait for the device and return the time."""
        if not on_gpu():
            return self._elapsed_ms
        self._end.synchronize()
        return self._begin.elapsed_time(self._end)


def mixed_orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names again and again, each time in another order: the same orders in each process."""
    order, shuffle = list(names), random.Random(0).shuffle
    while True:
        shuffle(order)
        yield order


def take_turns(calls: dict[str, Call], *, seconds: float, least: int = 5, most: int = 30) -> dict[str, float]:
    """Return the median milliseconds of each call.

    In each round every call runs once, each after a flush of the L2 cache, so that drift affects all calls equally. The
    order differs from round to round: a call that follows one of high power runs at a lower clock.

    Args:
        calls: what to time, by name. Each runs twice before the rounds.
        seconds: device time for all rounds.
        least: smallest number of rounds.
        most: largest number of rounds.
    """
    warm = {}
    for name, call in calls.items():
        call()
        watch = Stopwatch()
        call()
        warm[name] = watch.stop().milliseconds()
    rounds = min(most, max(least, int(seconds * 1e3 / (sum(warm.values()) + 0.1 * len(calls)))))
    flushed = torch.empty(_L2_FLUSH_BYTES, dtype=torch.int8, device="cuda") if on_gpu() else None
    watches: dict[str, list[Stopwatch]] = {name: [] for name in calls}
    for order in islice(mixed_orders(calls), rounds):
        if on_gpu():
            torch.cuda._sleep(_HEAD_START_CYCLES)
        for name in order:
            if flushed is not None:
                flushed.zero_()
            watch = Stopwatch()
            calls[name]()
            watches[name].append(watch.stop())
    return {name: statistics.median(w.milliseconds() for w in taken) for name, taken in watches.items()}


def back_to_back(call: Call, milliseconds: float, seconds: float) -> float:
    """Return the milliseconds per call when calls of about `milliseconds` run back to back for about `seconds`."""
    repeats = max(3, int(seconds * 1e3 / milliseconds))
    watch = Stopwatch()
    for _ in range(repeats):
        call()
    return watch.stop().milliseconds() / repeats


def ceilings() -> dict[str, float]:
    """Return TFLOP/s of a large bf16 matrix product and TB/s of a large copy (read plus written), on random data."""
    if not on_gpu():
        return {}
    a, b = (torch.randn(_MATMUL, _MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.randint(0, 100, (_COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    calls = {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}
    medians = take_turns(calls, seconds=0.2)
    sustained = back_to_back(calls["matmul"], medians["matmul"], 0.5)
    return {
        "matmul_tflops": 2 * _MATMUL**3 / medians["matmul"] / 1e9,
        "matmul_sustained_tflops": 2 * _MATMUL**3 / sustained / 1e9,
        "copy_tbytes_per_s": 2 * _COPY_BYTES / medians["copy"] / 1e9,
    }


def _gpu_id() -> str:
    """Return nvidia-smi's name of torch's device. Its numbers also count GPUs that CUDA_VISIBLE_DEVICES hides."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{device.pci_domain_id:08x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"


class Sensors:
    """Reads power, SM clock and temperature with nvidia-smi every 0.1 s inside the context."""

    _QUERY = "power.draw.instant,clocks.sm,temperature.gpu"

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float, float]] = []  # (time, W, MHz, degrees C)
        self._process = None

    def __enter__(self) -> "Sensors":
        if on_gpu() and shutil.which("nvidia-smi"):
            command = [
                "nvidia-smi",
                f"--query-gpu={self._QUERY}",
                "--format=csv,noheader,nounits",
                f"--id={_gpu_id()}",
                "-lms",
                "100",
            ]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()
            time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)

    def _read(self) -> None:
        for line in self._process.stdout:
            try:
                self._samples.append((time.monotonic(), *(float(value) for value in line.split(","))))
            except ValueError:  # "[N/A]": the device does not report a value
                return

    def since(self, begin: float) -> dict[str, float]:
        """Return the medians of the samples since `begin`, a time.monotonic(). Without samples, return {}."""
        taken = [sample for sample in self._samples if sample[0] >= begin]
        if not taken:
            return {}
        _, watts, clocks, degrees = (statistics.median(column) for column in zip(*taken, strict=True))
        return {"watts": watts, "sm_mhz": clocks, "celsius": degrees}


def machine() -> dict[str, str]:
    """Return the date, the GPU and the versions of a measurement."""
    about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    if not on_gpu():
        return about | {"gpu": "none: wall times of a dry run"}
    fields = "driver_version,power.limit,memory.total"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={_gpu_id()}"]
    driver, power, memory = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split(", ")
    return about | {
        "gpu": f"{torch.cuda.get_device_name()}, {memory.strip()}, {power} limit",
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
    }
