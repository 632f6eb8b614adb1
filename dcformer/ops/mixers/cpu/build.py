"""Compiles the CPU kernel at first use; the result is cached by source, flags and torch version.

Several processes may build at once: each compiles into a file of its own and renames it into place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_HEADERS = ("gemm.h", "compose.h", "problem.h")
# And how far the compiler is to optimise each; the last only hands tensors over, and takes longest to compile.
_SOURCES = {"forward.cpp": "-O3", "backward.cpp": "-O3", "attention.cpp": "-O1"}


class BuildError(RuntimeError):
    """The kernel could not be built; the message holds the compiler's own words."""


def cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/dcformer or ~/.cache/dcformer."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcformer"


def compiler() -> str | None:
    """The C++ compiler: $CXX, else the first of c++, g++ and clang++ on the path."""
    chosen = os.environ.get("CXX")
    candidates = [chosen] if chosen else ["c++", "g++", "clang++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


def vector_flags() -> list[str]:
    """Flags for the vectors that PyTorch itself uses on this processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return [
            "-DCPU_CAPABILITY_AVX512",
            "-DCPU_CAPABILITY=AVX512",
            "-mavx512f",
            "-mavx512dq",
            "-mavx512vl",
            "-mavx512bw",
            "-mfma",
        ]
    if capability == "AVX2":
        return ["-DCPU_CAPABILITY_AVX2", "-DCPU_CAPABILITY=AVX2", "-mavx2", "-mfma", "-mf16c"]
    return ["-DCPU_CAPABILITY=DEFAULT"]


def _commands(cxx: str, folder: Path, output: Path) -> tuple[list[list[str]], list[str]]:
    """The commands that compile the sources to objects in `folder`, and the one that links them."""
    root = Path(torch.__file__).parent
    openmp = ["-Xpreprocessor", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-w", abi, *vector_flags(), *openmp]
    here = Path(__file__).parent
    objects = [str((folder / name).with_suffix(".o")) for name in _SOURCES]
    compiles = [
        [cxx, *flags, level, *includes, "-c", str(here / name), "-o", made]
        for (name, level), made in zip(_SOURCES.items(), objects, strict=True)
    ]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    return compiles, [cxx, "-shared", *openmp, *objects, "-o", str(output), *libraries]


def library_path(cxx: str) -> Path:
    """The file that holds the kernel built from this source, with these flags, against this torch."""
    key = hashlib.sha256()
    for name in (*_HEADERS, *_SOURCES):
        key.update(Path(__file__).with_name(name).read_bytes())
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    commands = _commands(cxx, Path(), Path())
    key.update(repr((commands, version, torch.__version__, sysconfig.get_platform())).encode())
    return cache_dir() / f"cpu-{key.hexdigest()[:20]}.so"


def _build(cxx: str, target: Path) -> None:
    print("dcformer: compiling the CPU kernel (once, about 15 s) ...", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # beside the target, which it is renamed to
        library = Path(folder, "library.so")
        compiles, link = _commands(cxx, Path(folder), library)
        with ThreadPoolExecutor(len(compiles)) as pool:
            list(pool.map(_run, compiles))
        _run(link)
        os.replace(library, target)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"{command[0]} failed:\n{result.stderr.strip()}")


def library() -> Path:
    """The compiled kernel, built where it is not there yet.

    Raises:
        BuildError: it cannot be built; the message holds the compiler's own words.
        OSError: the cache cannot be written.
    """
    cxx = compiler()
    if cxx is None:
        chosen = os.environ.get("CXX")
        raise BuildError(
            f"CXX={chosen!r} is no program on the path"
            if chosen
            else "no C++ compiler found; install g++ or clang++, or set CXX"
        )
    target = library_path(cxx)
    if not target.exists():
        _build(cxx, target)
    return target
