"""Times and peak memory of composed attention beside PyTorch's own attention, in one run.

    python benchmarks/attention.py [--quick] [--out results/attention]

Writes attention.csv (a line a case: medians, ratios), memory.csv, training.csv (steps of a 10M model, with composition and
without), attention.json (machine, versions, commit), attention.png.
Every ratio is a median over rounds in which all backends take turns, so that a machine that slows down slows all of them.

B batch, T queries and keys, N heads, D head dim, W window.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F

from dcformer import DCFormerConfig, DCFormerForCausalLM, composed_attention
from dcformer.studies.provenance import provenance
from dcformer.testing import make_inputs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = ("forward", "forward + backward")
SDPA = "sdpa"


@dataclass(frozen=True)
class Case:
    """One shape. `passes` is "forward" or "forward + backward"; `T` queries see `S` keys, with S = 0 those before them.

    0 threads are all."""

    N: int = 16
    D: int = 64
    T: int = 2048
    S: int = 0
    window: int = 0
    dtype: str = "fp32"
    passes: str = "forward + backward"
    threads: int = 0


@dataclass(frozen=True)
class Line:
    """A line of attention.csv; seconds are medians."""

    N: int
    D: int
    T: int
    S: int
    window: int
    dtype: str
    passes: str
    threads: int
    backend: str
    seconds: float
    times_sdpa: float
    rounds: int


def cases(quick: bool) -> list[Case]:
    main = [Case(dtype=dtype, passes=passes) for dtype in DTYPES for passes in PASSES]
    if quick:
        return [replace(case, T=256) for case in main]
    lengths = [Case(T=T, passes=passes) for T in (128, 512, 1024, 4096, 8192, 16384) for passes in PASSES]
    shapes = [Case(N=N, D=D) for N in (8, 16, 32) for D in (64, 80, 128) if (N, D) != (16, 64)]
    scaling = [Case(threads=1, passes=passes) for passes in PASSES]
    decoding = [Case(T=T, S=4096, passes="forward", dtype=dtype) for T in (1, 8) for dtype in DTYPES]
    return [*main, *scaling, *shapes, Case(T=8192, window=256), *decoding, *lengths]


def runner(case: Case, backend: str) -> Callable[[], None]:
    inputs = make_inputs(N=case.N, T=case.T, S=case.S or case.T, D=case.D, parts="qk", dtype=DTYPES[case.dtype])
    query, key, value = inputs.call()[:3]
    causal, window = not case.S, case.window or None

    def attend() -> torch.Tensor:
        if backend == SDPA:
            return (
                windowed_sdpa(query, key, value, window)
                if window
                else F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            )
        return composed_attention(*inputs.call(), is_causal=causal, window=window, backend=backend)

    def run() -> None:
        if case.passes == "forward":
            with torch.no_grad():
                attend()
        else:
            attend().sum().backward()

    return run


def windowed_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """The pairs of a window, T W, at the least cost: queries in blocks of W, each on W keys, without a mask."""
    blocks = (states.flatten(0, 1).unflatten(1, (-1, window)) for states in (query, key, value))
    return F.scaled_dot_product_attention(*blocks)


def measure(case: Case, backends: list[str], rounds: int) -> list[Line]:
    all_threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or all_threads)
    runs = {backend: runner(case, backend) for backend in backends}
    seconds: dict[str, list[float]] = {backend: [] for backend in backends}
    for run in runs.values():
        run()  # warm up
    for _ in range(rounds):
        for backend, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[backend].append(time.perf_counter() - start)
    torch.set_num_threads(all_threads)
    lines = []
    for backend, times in seconds.items():
        ratio = statistics.median(t / s for t, s in zip(times, seconds[SDPA], strict=True))
        lines.append(Line(*astuple(case), backend, statistics.median(times), ratio, rounds))
    return lines


MEMORY = """
import sys, torch
from pathlib import Path
from dcformer import composed_attention
from dcformer.testing import make_inputs
length, backend, passes = int(sys.argv[1]), sys.argv[2], sys.argv[3]
make = lambda T: make_inputs(N=16, T=T, D=64, parts="qk")
small = make(64)
composed_attention(*small.call(), is_causal=True, backend=backend).sum().backward()  # libraries are loaded
inputs = make(length)
size = sum(t.numel() * t.element_size() for t in inputs.floats())
peak = lambda: 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = peak()
if passes == "forward":
    with torch.no_grad():
        composed_attention(*inputs.call(), is_causal=True, backend=backend)
else:
    composed_attention(*inputs.call(), is_causal=True, backend=backend).sum().backward()
print(size, peak() - before)
"""


def measure_memory(lengths: list[int], backends: list[str]) -> list[dict[str, object]]:
    """Peak above the inputs, each in a process of its own; `results_mib` of it are the output and the gradients."""
    lines: list[dict[str, object]] = []
    for T in lengths:
        for backend in backends:
            for passes in PASSES:
                command = [sys.executable, "-c", MEMORY, str(T), backend, passes]
                size, extra = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                results = 16 * T * 64 * 4 + (int(size) if "backward" in passes else 0)
                sizes = {"inputs_mib": int(size), "extra_mib": int(extra), "results_mib": results}
                mib = {name: round(value / 2**20) for name, value in sizes.items()}
                lines.append({"T": T, "N": 16, "D": 64, "backend": backend, "passes": passes, **mib})
    return lines


def measure_training(rounds: int, B: int = 4, T: int = 512) -> list[dict[str, object]]:
    """Steps of training (forward, backward, AdamW) of the 10M model, with composition and without, in turns."""
    models = {}
    for name, changes in (("dcformer", {}), ("compose=None", {"compose": None})):
        torch.manual_seed(0)
        config = DCFormerConfig.from_size("10M", vocab_size=4096, max_position_embeddings=T, **changes)
        model = DCFormerForCausalLM(config)
        models[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(4096, (B, T))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):  # the first one warms up
        for name, (model, optimizer) in models.items():
            start = time.perf_counter()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    plain = seconds["compose=None"]
    lines: list[dict[str, object]] = []
    for name, times in seconds.items():
        ratio = statistics.median(t / s for t, s in zip(times, plain, strict=True))
        parameters = models[name][0].num_parameters()
        line = {"model": name, "parameters": parameters, "B": B, "T": T, "seconds": statistics.median(times)}
        lines.append({**line, "times_plain": ratio, "rounds": rounds})
    return lines


def plot(lines: list[Line], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    for backend in sorted({line.backend for line in lines}):
        shape = (16, 64, 0, 0, "fp32", 0)
        chosen = [li for li in lines if li.backend == backend and (li.N, li.D, li.S, li.window, li.dtype, li.threads) == shape]
        chosen = sorted((li for li in chosen if li.passes == "forward + backward"), key=lambda li: li.T)
        axes.plot([li.T for li in chosen], [li.times_sdpa for li in chosen], marker="o", label=backend)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="length T",
        ylabel="time / time of plain attention",
        title="forward + backward, fp32, N=16, D=64",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/attention"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="small shapes only, to see that it runs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for case in cases(arguments.quick):
        backends = [SDPA, "cpu"]
        if case.T <= 2048:
            backends.append("chunked")
        if case == replace(Case(), passes=case.passes):  # it is too slow for more
            backends.append("reference")
        slow = case.T > 2048 or (case.dtype != "fp32" and "backward" in case.passes)
        rounds = max(2, arguments.rounds // 3) if slow else arguments.rounds
        for line in measure(case, backends, rounds):
            lines.append(line)
            print(f"{case}  {line.backend:10} {line.seconds * 1e3:9.1f} ms  {line.times_sdpa:6.2f}x", flush=True)
    memory = measure_memory([256] if arguments.quick else [8192, 16384], ["cpu", "chunked"])
    training = measure_training(3 if arguments.quick else arguments.rounds, *((1, 64) if arguments.quick else ()))
    for row in (*memory, *training):
        print(row)
    write_csv(arguments.out / "memory.csv", memory)
    write_csv(arguments.out / "training.csv", training)
    names = [field.name for field in fields(Line)]
    write_csv(arguments.out / "attention.csv", [dict(zip(names, astuple(line), strict=True)) for line in lines])
    (arguments.out / "attention.json").write_text(json.dumps({"command": sys.argv, **provenance()}, indent=1) + "\n")
    plot(lines, arguments.out / "attention.png")


if __name__ == "__main__":
    main()
