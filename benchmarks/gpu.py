"""The `triton` backend on a GPU: is it right, how fast is it, what does a model gain? In under six minutes, with torch alone.

    benchmarks/gpu.sh                                                        (or python benchmarks/gpu.py [--out results/gpu])
    TRITON_INTERPRET=1 python benchmarks/gpu.py --rehearse --out FOLDER      the same code on the CPU, in tiny sizes

Writes checks.csv (20 shapes, some with every tile, and decoding, against the reference in float64), times.csv (beside
FlashAttention), model.csv (steps of training and decoding beside the same model without composition), jobs.csv (what ran to its
end, and what did not), gpu.json, gpu.png.
Ratios are medians over rounds in which all take turns. A job is a process, see gpu_jobs.py.

B batch, T queries, S keys, N heads, D head dim, W window.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import Clock, Gpu, Rehearsal, Run
from gpu_jobs import Files, Job, run_job
from gpu_model import Model, Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dcformer import composed_attention
from dcformer.ops import Call
from dcformer.ops.mixers.chunked import ChunkedMixer
from dcformer.studies.provenance import provenance
from dcformer.testing import Inputs, check_backend, make_inputs

FLASH, PLAIN = "flash", "compose=None"
GOALS = {"forward": 3.0, "training": 1.15, "memory": 1.1}
PAPER = Shape()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "one": (dict(T=1), dict(is_causal=True), "fp32"),
    "63": (dict(B=2, N=3, T=63, D=32), dict(is_causal=True), "fp32"),
    "65 grouped": (dict(B=2, N=12, T=65, D=64, K=4, G=2), dict(is_causal=True), "bf16"),
    "129 window": (dict(N=16, T=129, D=80, K=8), dict(is_causal=True, window=17), "fp16"),
    "1025": (dict(N=4, T=1025, D=32, parts="qk"), dict(is_causal=True), "bf16"),
    "1025 window": (dict(N=16, T=1025, D=64, parts="qk"), dict(is_causal=True, window=100), "bf16"),
    "25 heads": (dict(N=25, T=65, D=96), dict(is_causal=True), "fp32"),
    "32 heads": (dict(N=32, T=257, D=128, parts="qk"), dict(is_causal=True), "bf16"),
    "32 heads of 80": (dict(N=32, T=129, D=80, parts="qk"), dict(is_causal=True, window=64), "fp32"),
    "64 heads": (dict(N=64, T=65, D=16, parts="qk"), dict(is_causal=True), "fp16"),
    "bidirectional window": (dict(B=2, T=65), dict(window=5), "fp32"),
    "cross": (dict(B=2, T=33, S=65), dict(), "bf16"),
    "rows without keys": (dict(T=65, S=33), dict(is_causal=True, window=9), "fp32"),
    "padding": (dict(B=3, T=65, mask="bool padding"), dict(is_causal=True, window=4), "bf16"),
    "float mask by head": (dict(B=2, T=65, mask="float heads"), dict(window=11), "fp32"),
    "rank 1": (dict(R=1, parts="qk", G=4), dict(), "fp32"),
    "rank 4": (dict(T=65, R=4), dict(is_causal=True), "fp32"),
    "static": (dict(N=16, T=65, parts="b", G=2), dict(is_causal=True), "bf16"),
    "only before, key-wise": (dict(parts="k", K=1, sides="pre"), dict(is_causal=True), "fp16"),
    "decoding": (dict(B=2, N=32, T=1, S=1025, D=128, K=8, parts="qk"), dict(is_causal=True), "bf16"),
}
# Of the shapes above, those that run with each tile that the tuner may choose.
EVERY_TILE = ("32 heads", "static")
# Few queries without gradients, which have kernels of their own.
DECODING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "decode": (dict(N=32, T=1, S=4096, D=128, parts="qk"), dict(is_causal=True), "bf16"),
    "decode, shared key heads": (dict(B=3, N=32, T=1, S=1025, D=80, K=8, parts="qk"), dict(is_causal=True), "bf16"),
    "decode, static": (dict(N=16, T=2, S=500, D=64, K=4), dict(is_causal=True, window=256), "fp16"),
    "decode, mask": (dict(B=2, N=16, T=4, S=300, D=64, parts="qk", mask="bool"), dict(), "bf16"),
    "decode, tiny": (dict(N=2, T=1, S=20, D=16, parts="qk"), dict(is_causal=True), "bf16"),
    "decode, fp32": (dict(N=12, T=8, S=700, D=48, K=3, R=4), dict(is_causal=True), "fp32"),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The rounds of one shape may take `seconds`: fewer rounds on a slower machine. What takes longer
    than `most` in one call is skipped, and listed."""

    checks: tuple[str, ...] = tuple(CHECKS)
    every_tile: tuple[str, ...] = EVERY_TILE
    tiles: int = 4
    decoding: tuple[str, ...] = tuple(DECODING)
    N: int = 32
    head_dims: tuple[int, ...] = (80, 128)
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)
    windows: tuple[int, ...] = (0, 256)  # 0: global
    model: Shape = PAPER
    B: int = 2
    T: int = 4096
    seconds: float = 1.5
    most: float = 2.0
    total: float = 345.0  # of all jobs


TINY = Sizes(
    checks=("one",), every_tile=("one",), tiles=2, decoding=("decode, tiny",),
    N=2, head_dims=(16,), lengths=(12,), windows=(8,),
    model=Shape(layers=2, E=16, N=2, mlp=16, V=32, window=4), B=1, T=6, seconds=0, most=3600, total=3600,
)  # fmt: skip


def checked(name: str, dtype: str, run: Callable[[], None]) -> dict[str, Any]:
    """The line of a check, which fails by raising."""
    error = ""
    try:
        run()
    except Exception as failure:  # whatever it is, it goes into the table
        error = f"{type(failure).__name__}: {failure}".replace("\n", " ")[:300]
    return {"shape": name, "dtype": dtype, "right": not error, "error": error}


def check(clock: Clock, name: str) -> Iterator[dict[str, Any]]:
    """One shape against the reference in float64, with all gradients."""
    shape, options, dtype = CHECKS[name]
    draw = partial(make_inputs, dtype=DTYPES[dtype], device=clock.device, **shape)
    yield checked(name, dtype, partial(check_backend, draw, "triton", **options))


def check_tile(clock: Clock, name: str, i: int) -> Iterator[dict[str, Any]]:
    """`check` with the i-th of the tiles that the tuner may choose, forward and backward; the last where there are fewer."""
    from dcformer.ops.mixers.triton import launch

    launch.choose = lambda problem, tiles, *_, **__: tiles[min(i, len(tiles) - 1)]
    for line in check(clock, name):
        yield line | {"shape": f"{name}, tile {i}"}


def check_decoding(clock: Clock, name: str) -> Iterator[dict[str, Any]]:
    """The output against the reference in float64; the same bits from a CUDA graph, with other queries than it recorded."""
    shape, options, dtype = DECODING[name]
    draw = partial(cached_inputs, DTYPES[dtype], clock.device, shape)
    with torch.no_grad():
        yield checked(name, dtype, partial(check_backend, draw, "triton", gradients=False, **options))

        inputs = draw()
        call = partial(composed_attention, *inputs.call(), attn_mask=inputs.attn_mask, backend="triton", **options)

        def replayed() -> None:
            outs: list[Tensor] = []
            replay = clock.captured(lambda: outs.append(call()))
            inputs.query.copy_(torch.randn_like(inputs.query))
            replay()
            assert torch.equal(outs[-1], call()), "the graph's bits differ from those of launches"

        yield checked(f"{name}, CUDA graph", dtype, replayed)


def cached_inputs(dtype: torch.dtype, device: str, shape: dict[str, Any]) -> Inputs:
    """Inputs without gradients; if no heads share keys, keys, values, key-wise weights are views of caches [B, N, S, ...]."""
    inputs = make_inputs(dtype=dtype, device=device, **shape)
    sides, states = [], []
    for state, side in ((inputs.key, inputs.pre), (inputs.value, inputs.post)):
        assert side is not None and side.key is not None
        weights = side.key.detach().permute(0, 3, 1, 2)
        if state.shape[1] == weights.shape[1]:
            cache = torch.cat([state.detach(), weights], 3)
            state, weights = cache.split([state.shape[3], weights.shape[3]], 3)
        sides.append(side.map(Tensor.detach)._replace(key=weights.permute(0, 2, 3, 1)))
        states.append(state.detach())
    return Inputs(inputs.query.detach(), *states, *sides, inputs.attn_mask)


class CompiledChunked(ChunkedMixer):
    """`chunked` with its mixing compiled. The operator is opaque to the compiler, which would find nothing to do."""

    def __init__(self, compiler: str):
        torch._dynamo.config.recompile_limit = 64
        self.mix_forward = torch.compile(super().mix_forward, backend=compiler, dynamic=True)  # type: ignore[method-assign]
        self.mix_backward = torch.compile(super().mix_backward, backend=compiler, dynamic=True)  # type: ignore[method-assign]


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def runner(inputs: Inputs, window: int, backward: bool, backend: str, compiled: ChunkedMixer) -> Run:
    """One call, or one and its gradients. Of FlashAttention always global: it has no window here."""
    query, key, value, pre, post = inputs.call()
    grad = torch.randn_like(query)
    if backend == "chunked compiled":
        call = Call(query, key, value, pre, post, None, None, True, window or None, query.shape[3] ** -0.5, 0.0)

        @torch.no_grad()
        def mix() -> None:
            _, row_statistics = compiled.forward(call)
            if backward:
                compiled.backward(call, grad, row_statistics, False)

        return mix

    def attend() -> Tensor:
        if backend == FLASH:
            return flash(query, key, value)
        return composed_attention(*inputs.call(), is_causal=True, window=window or None, backend=backend)

    wanted = [query, key, value] if backend == FLASH else inputs.floats()

    def run() -> None:
        if backward:
            torch.autograd.grad(attend(), wanted, grad)
        else:
            with torch.no_grad():
                attend()

    return run


def take_turns(clock: Clock, runs: dict[str, Run], budget: float, most: float) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each in every round, and why those that have none were skipped. Each has run once before it is timed."""
    skipped: dict[str, str] = {}
    once: dict[str, float] = {}
    for name, run in runs.items():
        try:
            run()
            once[name] = clock.seconds(run)
            if once[name] > most:
                skipped[name] = f"skipped: a call takes {once.pop(name):.1f} s"
        except Exception as failure:  # as in `check`
            skipped[name] = f"failed: {type(failure).__name__} {failure}".splitlines()[0][:200]
            once.pop(name, None)
    rounds = max(3, min(20, int(budget / max(1e-9, sum(once.values())))))
    seconds: dict[str, list[float]] = {name: [] for name in once}
    for _ in range(rounds):
        for name in once:
            seconds[name].append(clock.seconds(runs[name]))
    return seconds, skipped


def compare(seconds: dict[str, list[float]], name: str, base: str) -> float | None:
    """Median over rounds of the ratio of two that took turns."""
    if name not in seconds or base not in seconds:
        return None
    return round(statistics.median(t / s for t, s in zip(seconds[name], seconds[base], strict=True)), 4)


def milliseconds(seconds: dict[str, list[float]], name: str) -> float | None:
    return round(1e3 * statistics.median(seconds[name]), 4) if name in seconds else None


def times(clock: Clock, sizes: Sizes, D: int, window: int, backends: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Forward, and forward with backward, at all lengths."""
    compiled = CompiledChunked(clock.compiler)
    for T in sizes.lengths:
        inputs = make_inputs(N=sizes.N, T=T, D=D, parts="qk", dtype=torch.bfloat16, device=clock.device)
        for passes in ("forward", "forward + backward"):
            backward = passes != "forward"
            runs = {name: runner(inputs, window, backward, name, compiled) for name in (FLASH, *backends)}
            seconds, skipped = take_turns(clock, runs, sizes.seconds, sizes.most)
            for name, run in runs.items():
                before = clock.allocated_mib()
                yield {
                    "N": sizes.N, "D": D, "T": T, "window": window, "dtype": "bf16", "passes": passes, "backend": name,
                    "ms": milliseconds(seconds, name), "times_flash": compare(seconds, name, FLASH),
                    "extra_mib": round(clock.peak_mib(run) - before, 1) if name in seconds else None,
                    "rounds": len(seconds.get(name, ())), "note": skipped.get(name, ""),
                }  # fmt: skip
        del runs
        clock.release()


def training(clock: Clock, sizes: Sizes, compiled: bool) -> Iterator[dict[str, Any]]:
    """Steps (forward, backward, AdamW) in bfloat16 autocast; memory is that of the model alone, with its optimizer."""
    ids = torch.randint(sizes.model.V, (sizes.B, sizes.T), device=clock.device)
    runs: dict[str, Run] = {}
    trained: dict[str, tuple[Model, torch.optim.Optimizer]] = {}
    for name, backend in ((PLAIN, None), ("triton", "triton")):
        with torch.device(clock.device):
            model = Model(sizes.model, backend)
        if compiled:
            for layer in model.layers:
                layer.compile(backend=clock.compiler)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        trained[name], runs[name] = (model, optimizer), partial(train, model, optimizer, ids)
    seconds, skipped = take_turns(clock, runs, 6 * sizes.seconds, sizes.most)
    held = {name: held_mib(*both) for name, both in trained.items()}
    peaks = {name: clock.peak_mib(runs[name]) - sum(held.values()) + held[name] for name in seconds}
    what = "training, compiled" if compiled else "training"
    yield from model_lines(sizes, what, sizes.B, sizes.T, seconds, skipped, peaks)


def held_mib(model: Model, optimizer: torch.optim.Optimizer) -> float:
    """Memory between the steps: parameters and the optimizer's state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *states)) / 2**20


def train(model: Model, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def decoding(clock: Clock, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A token at position T, all in bfloat16, launched one by one and as a CUDA graph."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=clock.device)
    runs: dict[str, Run] = {}
    for name, backend in ((PLAIN, None), ("triton", "triton")):
        with torch.device(clock.device):
            model = Model(sizes.model, backend).bfloat16()
        runs[name] = partial(model.decode, token, model.caches(sizes.T))
    seconds, skipped = take_turns(clock, runs, 2 * sizes.seconds, sizes.most)
    yield from model_lines(sizes, "decoding", 1, sizes.T, seconds, skipped, {})
    graphs = {name: clock.captured(runs[name]) for name in seconds}
    seconds, failed = take_turns(clock, graphs, 2 * sizes.seconds, sizes.most)
    yield from model_lines(sizes, "decoding, CUDA graph", 1, sizes.T, seconds, skipped | failed, {})


def model_lines(
    sizes: Sizes,
    what: str,
    B: int,
    T: int,
    seconds: dict[str, list[float]],
    skipped: dict[str, str],
    peaks: dict[str, float],
) -> Iterator[dict[str, Any]]:
    for name in (PLAIN, "triton"):
        yield {
            "what": what, "model": name, "layers": sizes.model.layers, "E": sizes.model.E, "heads": sizes.model.N,
            "B": B, "T": T, "window": sizes.model.window,
            "ms": milliseconds(seconds, name), "times_plain": compare(seconds, name, PLAIN),
            "peak_mib": round(peaks[name], 1) if name in peaks else None,
            "memory_times_plain": round(peaks[name] / peaks[PLAIN], 4) if {name, PLAIN} <= set(peaks) else None,
            "rounds": len(seconds.get(name, ())), "note": skipped.get(name, ""),
        }  # fmt: skip


def jobs(clock: Clock, sizes: Sizes) -> dict[str, Job]:
    """In the order of their weight: what the time does not suffice for comes last."""
    shapes = [(D, window) for window in sizes.windows for D in sizes.head_dims]
    mixers, compiled = ("triton", "chunked"), ("chunked compiled",)
    found = [
        *((f"check {name}", "checks", 90, partial(check, clock, name)) for name in sizes.checks),
        *(
            (f"check {name}, tile {i}", "checks", 90, partial(check_tile, clock, name, i))
            for name in sizes.every_tile
            for i in range(sizes.tiles)
        ),
        *((f"check {name}", "checks", 90, partial(check_decoding, clock, name)) for name in sizes.decoding),
        *((f"times D={D} W={W}", "times", 90, partial(times, clock, sizes, D, W, mixers)) for D, W in shapes),
        ("training", "model", 60, partial(training, clock, sizes, compiled=False)),
        ("decoding", "model", 45, partial(decoding, clock, sizes)),
        ("training, compiled", "model", 90, partial(training, clock, sizes, compiled=True)),
        *((f"compiled D={D} W={W}", "times", 60, partial(times, clock, sizes, D, W, compiled)) for D, W in shapes),
    ]
    return {name: Job(file, lines, clock.patience * seconds) for name, file, seconds, lines in found}


def goals(lines: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What was wanted beside what was measured."""
    wanted: list[tuple[str, float | None, float]] = []
    for line in lines.get("times", ()):
        if (line["backend"], line["passes"], line["window"]) == ("triton", "forward", 0):
            wanted.append((f"forward / flash, D={line['D']} T={line['T']}", line["times_flash"], GOALS["forward"]))
    for line in lines.get("model", ()):
        if line["model"] == "triton" and line["what"].startswith("training"):
            wanted.append((f"{line['what']} / {PLAIN}", line["times_plain"], GOALS["training"]))
            wanted.append((f"{line['what']}, memory / {PLAIN}", line["memory_times_plain"], GOALS["memory"]))
    return [
        {"what": what, "measured": ratio, "at_most": most, "met": ratio is not None and ratio <= most}
        for what, ratio, most in wanted
    ]


def table(lines: list[dict[str, Any]], columns: list[str]) -> None:
    cells = [columns, *([("" if line[c] is None else str(line[c])) for c in columns] for line in lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, passes in zip(panels, ("forward", "forward + backward"), strict=True):
        measured = [line for line in lines if line["passes"] == passes and line["times_flash"] and line["backend"] != FLASH]
        for backend, D, window in sorted({(line["backend"], line["D"], line["window"]) for line in measured}):
            chosen = [line for line in measured if (line["backend"], line["D"], line["window"]) == (backend, D, window)]
            label = f"{backend}, D={D}, {f'window {window}' if window else 'global'}"
            style = "--" if window else "-"
            axes.plot([line["T"] for line in chosen], [line["times_flash"] for line in chosen], style, marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel="length T", title=f"{passes}, bf16")
    panels[0].axhline(GOALS["forward"], color="grey", linewidth=0.8)
    panels[0].set_ylabel("time / time of FlashAttention, global")
    panels[1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in tiny sizes, to see that it runs")
    parser.add_argument("--job", help="what a process of this script is told")
    arguments = parser.parse_args()
    sizes = TINY if arguments.rehearse else Sizes()
    if not arguments.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --rehearse runs on the CPU")
    clock: Clock = Rehearsal() if arguments.rehearse else Gpu()
    todo = jobs(clock, sizes)
    if arguments.job:
        torch.manual_seed(0)  # what fails can be run again
        for line in todo[arguments.job].lines():
            print(json.dumps(line), flush=True)
        return 0
    end = time.monotonic() + sizes.total
    files = Files(arguments.out)
    about = {"command": sys.argv, "device": clock.description(), **provenance()}
    (arguments.out / "gpu.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about), flush=True)
    command = [sys.executable, __file__, *(["--rehearse"] if arguments.rehearse else []), "--job"]
    checks = [name for name, job in todo.items() if job.file == "checks"]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # most of their time is Triton's compiler's
        list(pool.map(lambda name: run_job(name, todo[name], files, [*command, name], end), checks))
    for name in [name for name in todo if name not in checks]:
        run_job(name, todo[name], files, [*command, name], end)
    lines = files.lines
    print()
    table(lines.get("times", []), ["D", "T", "window", "passes", "backend", "ms", "times_flash", "extra_mib", "note"])
    table(lines.get("model", []), ["what", "model", "ms", "times_plain", "peak_mib", "memory_times_plain", "note"])
    reached = goals(lines)
    table(reached, ["what", "measured", "at_most", "met"])
    wrong = [line for line in lines.get("checks", ()) if not line["right"]]
    undone = [line for line in lines["jobs"] if line["outcome"] != "done"]
    table(wrong, ["shape", "dtype", "error"])
    table(undone, ["job", "lines", "seconds", "outcome"])
    ran = len(lines.get("checks", ()))
    print(f"{len(wrong)} of {ran} checks failed; {len(undone)} of {len(todo)} jobs did not run to their end")
    (arguments.out / "gpu.json").write_text(json.dumps({**about, "goals": reached}, indent=1) + "\n")
    plot(lines.get("times", []), arguments.out / "gpu.png")
    return int(bool(wrong) or bool(undone))


if __name__ == "__main__":
    sys.exit(main())
