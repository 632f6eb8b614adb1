"""What this machine gives dcformer: compiler, processor, devices, and which backend `auto` takes where and why."""

from __future__ import annotations

import platform
import subprocess

import torch

from dcformer.ops import explain
from dcformer.ops.driver import multiplies
from dcformer.ops.mixers.cpu import build
from dcformer.studies.provenance import versions

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def report() -> list[tuple[str, str]]:
    """Pairs of what and how it stands. Compiles the CPU kernel where that has not been done yet."""
    lines = [("versions", ", ".join(f"{name} {number or 'not installed'}" for name, number in versions().items()))]
    lines.append(("processor", _processor()))
    lines.append(("compiler", _compiler()))
    lines.append(("kernel cache", str(build.cache_dir())))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines.append(("GPUs", ", ".join(gpus) or "none that PyTorch can use"))
    for device in ["cpu"] + ["cuda"] * bool(gpus):
        for dtype in (torch.float32, *HALF.values()):
            x = torch.zeros(1, 2, 4, 8, device=device, dtype=dtype)
            found = explain(x, x, x)
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in found.reasons.items())
            lines.append((f"{device} {str(dtype).removeprefix('torch.')}", f"auto takes {found.backend!r}{reasons}"))
    return lines


def _processor() -> str:
    half = [name for name, dtype in HALF.items() if multiplies(torch.device("cpu"), dtype)]
    instructions = f"instructions for {' and '.join(half)}" if half else "no instructions for half precision"
    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, vectors {vectors}, {instructions}, {torch.get_num_threads()} threads"


def _compiler() -> str:
    cxx = build.compiler()
    if cxx is None:
        return "none found; install g++ or clang++, or set CXX"
    shown = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    return f"{cxx}: {shown.splitlines()[0] if shown else 'it does not say its version'}"
