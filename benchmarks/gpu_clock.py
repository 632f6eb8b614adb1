"""Time and peak memory on a GPU, and what stands for them in a rehearsal on the CPU: all that differs between the two.

`TRITON_INTERPRET=1` lets kernels run on the CPU.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]


class Gpu:
    """The current CUDA device."""

    device = "cuda"
    compiler = "inductor"
    patience = 1  # how much longer everything may take

    def __init__(self) -> None:
        # Twice the second-level cache of an H200, so that no round finds its inputs there.
        self._flush = torch.empty(2 * 60 << 20, dtype=torch.int8, device="cuda")

    def seconds(self, run: Run) -> float:
        """Of one call that finds a cold cache. The GPU is still busy flushing when the first launch arrives."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def allocated_mib(self) -> float:
        """Memory in tensors."""
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() / 2**20

    def peak_mib(self, run: Run) -> float:
        """The most memory that was in tensors at once during a call."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**20

    def captured(self, run: Run) -> Run:
        """The replay of a CUDA graph of `run`, which must have run before."""
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def release(self) -> None:
        """Gives memory that no tensor holds back to the device."""
        torch.cuda.empty_cache()

    def description(self) -> dict[str, str]:
        """What the driver says."""
        fields = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            line = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            line = ""
        values = [value.strip() for value in line.split(",")] if line else ["unknown"] * len(fields)
        found = dict(zip(fields, values, strict=True))
        return {**found, "cuda": str(torch.version.cuda), "capability": str(torch.cuda.get_device_capability())}


class Rehearsal:
    """The same on the CPU, where only that it runs matters."""

    device = "cpu"
    compiler = "eager"  # traced as on a GPU, without a minute of C++
    patience = 20

    def seconds(self, run: Run) -> float:
        """Of one call."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def allocated_mib(self) -> float:
        """Unknown."""
        return 0.0

    def peak_mib(self, run: Run) -> float:
        """Unknown; it runs."""
        run()
        return math.nan

    def captured(self, run: Run) -> Run:
        """The same."""
        return run

    def release(self) -> None:
        """Nothing."""

    def description(self) -> dict[str, str]:
        """That there is no GPU."""
        return {"name": "none: a rehearsal on the CPU"}


Clock = Gpu | Rehearsal
