"""The roofline: this machine's memory bandwidth and matrix rate, and the lower bound that they set for decoding.

A token of plain decoding at batch 1 reads every weight once, so it takes at least

    floor = bytes of weights / read bandwidth

(plus the KV cache and all arithmetic). Speculation reads the weights once for several tokens, which is the only way
below this floor without changing the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from anabranch.model.decoder import Decoder
from anabranch.model.pack import weight_bytes
from anabranch.native.library import library

__all__ = ["Machine", "last_level_cache", "measure_machine", "read_rate"]

REPEATS = 9
SIDE = {"cpu": 1536, "cuda": 8192}  # of the square matrices: 7 and 1,100 GFLOP per product
LEAST = {"cpu": 2**29, "cuda": 2**32}  # minimum bytes to read, so that the launch of a kernel is negligible


@dataclass(frozen=True)
class Machine:
    """Measured rates, each with its quartiles over repeats.

    read_gb_s       10^9 bytes per second read from ``buffer_mb`` MB by all threads, with the faster of two kernels
    matrix_tflop_s  10^12 operations per second in square products of ``dtype``; a multiply-add counts as two
    weight_mb       10^6 bytes of weights read by a pass over one token
    floor_ms        minimum milliseconds per token of plain decoding: weight_mb / read_gb_s
    """

    threads: int
    dtype: str
    buffer_mb: float
    read_gb_s: tuple[float, float, float]
    matrix_tflop_s: tuple[float, float, float]
    weight_mb: float

    @property
    def floor_ms(self) -> float:
        """The floor at the median read bandwidth."""
        return self.weight_mb / self.read_gb_s[1]

    def to_dict(self) -> dict[str, Any]:
        """For result files."""
        return asdict(self) | {"floor_ms": round(self.floor_ms, 4)}


def measure_machine(decoder: Decoder, *, buffer_bytes: int | None = None, repeats: int = REPEATS) -> Machine:
    """Measure the device of ``decoder``, with torch's threads and the decoder's dtype.

    ``buffer_bytes`` is by default eight times the last-level cache, and at least 512 MiB (4 GiB on a GPU). With the
    native kernels it is in large pages, like their weights.
    """
    device = decoder.device
    kind = "cuda" if device.type == "cuda" else "cpu"
    size = max(LEAST[kind], 8 * last_level_cache(device)) if buffer_bytes is None else buffer_bytes
    reads = _reads(device, size, repeats)
    side = SIDE[kind]
    square = torch.randn(side, side, device=device).to(decoder.dtype)
    products = _rates(lambda: square @ square, 2 * side**3, device, repeats)
    return Machine(
        threads=torch.get_num_threads(),
        dtype=str(decoder.dtype).removeprefix("torch."),
        buffer_mb=round(size / 1e6, 1),
        read_gb_s=_quartiles(reads, 1e9),
        matrix_tflop_s=_quartiles(products, 1e12),
        weight_mb=round(weight_bytes(decoder) / 1e6, 3),
    )


def read_rate() -> float:
    """Bytes that all threads read in a second from the CPU's memory: the median of a few reads of 512 MiB or more."""
    device = torch.device("cpu")
    return statistics.median(_reads(device, max(LEAST["cpu"], 8 * last_level_cache(device)), repeats=3))


def _reads(device: torch.device, size: int, repeats: int) -> list[float]:
    """Bytes per second of reads of ``size`` bytes, with the faster of two kernels."""
    kernels = library() if device.type == "cpu" else None
    words = torch.empty(size, dtype=torch.uint8, device=device) if kernels is None else kernels.large(size)
    words = words[: size // 8 * 8].view(torch.int64).fill_(1)
    floats = words.view(torch.float32)
    return max((_rates(read, size, device, repeats) for read in (words.sum, floats.max)), key=statistics.median)


def _rates(work: Callable[[], Any], amount: int, device: torch.device, repeats: int) -> list[float]:
    """``amount`` divided by the seconds of each repeat, after a warm-up."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return [amount / once() for _ in range(max(2, repeats))]


def _quartiles(values: list[float], unit: float) -> tuple[float, float, float]:
    low, middle, high = (round(value / unit, 4) for value in statistics.quantiles(values, n=4, method="inclusive"))
    return low, middle, high


def last_level_cache(device: torch.device) -> int:
    """The size of the last-level cache in bytes; 0 if unknown."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)
