"""Registers, spills, shared memory and occupancy of the Triton kernels, compiled ahead of time. It needs no GPU.

    python benchmarks/triton_resources.py [--heads 16 32] [--archs 80 90 100] [--out results]

Writes triton_resources.csv (a line a kernel, shape and architecture) and triton_resources.json (machine, versions, commit).
Kernels are recorded from real launches on meta tensors, so tiles and specialisations are those of `launch.py`.

The mixer's kernels see scores and not the vectors that were multiplied: they do not depend on D, and have one line for
64, 80 and 128. Kernels that do give theirs in the column `D`.

N heads, D head dim, R rank, S keys, C queries of a block.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # fused multiply-adds: every release's default up to 3.9, and said since

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from dcformer.ops import Composition
from dcformer.ops.driver import Block, BlockGrads
from dcformer.ops.mixers import Call
from dcformer.ops.mixers.triton import backward, decoding, forward, launch, launch_decoding
from dcformer.studies.provenance import provenance
from dcformer.training.files import write_json, write_text

HEADS, HEAD_DIMS, ARCHS, RANK = (16, 32), (64, 80, 128), (80, 90, 100), 2
PARTS = ("qk", "qkb")  # query- and key-wise weights, and a static base beside them
# Of one multiprocessor, after the CUDA programming guide: KiB of shared memory, bytes of it that a program loses,
# the most programs, registers, warps.
SHARED = {80: 164, 90: 228, 100: 228}
RESERVED, PROGRAMS, REGISTERS, WARPS = 1024, 32, 65536, 64
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8"}


@dataclass(frozen=True)
class Launch:
    """One launch as recorded: the kernel and what it was given."""

    kernel: JITFunction
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A line of the file. Spills and stack in bytes a thread, shared memory in bytes a program; `occupancy` is of a
    multiprocessor's warps, `limit` what bounds it."""

    family: str
    kernel: str
    N: int
    D: str
    R: int
    parts: str
    arch: str
    tile: str
    warps: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    tensor_cores: bool
    occupancy: float
    limit: str


class _Recorder:
    """Stands in for a kernel: what would be launched is noted."""

    def __init__(self, kernel: JITFunction, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: self.launches.append(Launch(self.kernel, arguments, options))


@contextmanager
def recorded(*modules: ModuleType) -> Iterator[list[Launch]]:
    """While it lasts, launches of the modules' kernels are collected in the list and nothing runs."""
    launches: list[Launch] = []
    kernels = [(m, name, value) for m in modules for name, value in vars(m).items() if isinstance(value, JITFunction)]
    try:
        for module, name, kernel in kernels:
            setattr(module, name, _Recorder(kernel, launches))
        yield launches
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def mixer_launches(family: str, N: int, parts: str, C: int = 64, S: int = 4096) -> list[Launch]:
    """The launches of one causal block, forward or backward, in bfloat16."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta")

    def composition() -> Composition:
        base = empty(1, N, N) if "b" in parts else None
        return Composition(base, empty(1, C, 2 * RANK + 1, N), empty(1, 2 * RANK + 1, N, S).movedim(-1, 1), 1)

    block = Block(composition(), composition(), None, None, S - C + 1, torch.bfloat16)
    scores = empty(1, N, C, S)
    with recorded(forward, backward) as launches:
        if family == "forward":
            launch.mix_forward(scores, block)
        else:
            grads = BlockGrads(composition(), composition(), None)
            launch.mix_backward(scores, empty(1, N, C, S), empty(1, N, C, 2), block, grads)
    return launches


def decoding_launches(N: int, D: int, parts: str, S: int = 4096) -> list[Launch]:
    """Those of one query in bfloat16, with key-wise weights behind keys and values as a cache has them."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16)

    cached = [empty(1, N, S, D + 2 * RANK + 1) for _ in range(2)]
    sides = [
        Composition(empty(1, N, N) if "b" in parts else None, empty(1, 1, 2 * RANK + 1, N), c[..., D:].permute(0, 2, 3, 1))
        for c in cached
    ]
    key, value = (c[..., :D] for c in cached)
    with recorded(decoding) as launches:
        launch_decoding.forward(Call(empty(1, N, 1, D), key, value, *sides, None, None, True, None, D**-0.5, 0.0))
    return launches


def compiled(launch: Launch, arch: int) -> CompiledKernel:
    """As Triton would compile it at that launch, with its specialisations for 1, multiples of 16 and `None`."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(launch.kernel.params, launch.arguments, strict=True)):
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name], constants[i,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if specialised and isinstance(value, int) and value % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def assembled(ptx: str, arch: int) -> dict[str, int]:
    """What the assembler that Triton takes says of the kernel."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", "-arch", target[1], path, "-o", path.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    patterns = {"registers": r"Used (\d+) registers", "stack": r"(\d+) bytes stack"}
    patterns |= {f"spill_{way}": rf"(\d+) bytes spill {way}" for way in ("stores", "loads")}
    numbers = {name: re.search(pattern, done.stderr) for name, pattern in patterns.items()}
    return {name: int(number[1]) for name, number in numbers.items() if number is not None}


def occupancy(arch: int, registers: int, shared: int, warps: int) -> tuple[float, str]:
    """Warps that a multiprocessor holds at once, of those that it could, and what allows no more."""
    of_warp = -(-registers * 32 // 256) * 256  # registers are given out to warps by 256, and lie in four parts
    programs = {
        "registers": REGISTERS // 4 // of_warp * 4 // warps,
        "shared memory": SHARED[arch] * 1024 // (shared + RESERVED),
        "programs": PROGRAMS,
        "warps": WARPS // warps,
    }
    limit = min(programs, key=lambda name: programs[name])
    return round(programs[limit] * warps / WARPS, 3), limit


def measure(family: str, launch: Launch, arch: int, N: int, parts: str, D: str = "any") -> Line:
    kernel = compiled(launch, arch)
    found = assembled(kernel.asm["ptx"], arch)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    names = [parameter.name for parameter in launch.kernel.params]
    sizes = {name: value for name, value in zip(names, launch.arguments, strict=True) if name.isupper() and len(name) == 2}
    return Line(
        family, launch.kernel.__name__, N, D, RANK, parts, f"sm_{arch}",
        " ".join(f"{name}={sizes[name]}" for name in ("BT", "BS", "BR", "BL") if name in sizes),
        warps, found["registers"], found["spill_stores"], found["spill_loads"], found["stack"], shared,
        re.search(r"\b(w?g?mma|tcgen05\.mma)\b", kernel.asm["ptx"]) is not None,
        *occupancy(arch, found["registers"], shared, warps),
    )  # fmt: skip


def lines(heads: list[int], archs: list[int]) -> Iterator[Line]:
    for family in ("forward", "backward"):
        for N in heads:
            for parts in PARTS:
                for recorded_launch in mixer_launches(family, N, parts):
                    for arch in archs:
                        yield measure(family, recorded_launch, arch, N, parts)
    for N, parts, D, arch in product(heads, PARTS, HEAD_DIMS, archs):
        for recorded_launch in decoding_launches(N, D, parts):
            yield measure("decoding", recorded_launch, arch, N, parts, str(D))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS)
    parser.add_argument("--archs", type=int, nargs="+", default=ARCHS, choices=ARCHS)
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: kernels of the interpreter cannot be compiled; unset it")
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(Line)], lineterminator="\n")
    writer.writeheader()
    for line in lines(arguments.heads, arguments.archs):
        writer.writerow(asdict(line))
        print(*asdict(line).values(), flush=True)
    write_text(arguments.out / "triton_resources.csv", table.getvalue())
    write_json(arguments.out / "triton_resources.json", {"command": sys.argv, **provenance()})


if __name__ == "__main__":
    main()
