"""The CPU kernel's build: cached, safe when several processes build at once, and clear where it cannot be built."""

import os
import subprocess
import sys

import pytest

from dcformer.ops.mixers.cpu import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")

USE = """
import torch, warnings
from dcformer import composed_attention
from dcformer.ops import explain
warnings.simplefilter("error" if {strict} else "default")
x = torch.randn(1, 2, 5, 8)
composed_attention(x, x, x)
print(explain(x, x, x))
"""


def start(cache, code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_build_at_once_and_a_third_finds_it(tmp_path):
    processes = [start(tmp_path, USE.format(strict=True)) for _ in range(2)]
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert "auto takes 'cpu'" in out
        assert err.count("compiling the CPU kernel") <= 1
    files = list((tmp_path / "dcformer").iterdir())
    assert len(files) == 1 and files[0].suffix == ".so"  # no temporary file is left
    out, err = start(tmp_path, USE.format(strict=True)).communicate()
    assert "auto takes 'cpu'" in out and "compiling" not in err


def test_without_a_compiler(tmp_path):
    code = USE.format(strict=False) + "composed_attention(x, x, x)\ncomposed_attention(x, x, x, backend='cpu')"
    process = start(tmp_path, code, PATH="", CXX="")
    out, err = process.communicate()
    assert "auto takes 'chunked'" in out
    assert err.count("takes the slower backend 'chunked'") == 1
    assert "ValueError: backend='cpu' cannot serve this request" in err and "no C++ compiler found" in err


def test_a_failed_build_shows_the_compilers_words(tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'forward.cpp:1: error: out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    code = USE.format(strict=False) + "composed_attention(x, x, x, backend='cpu')"
    out, err = start(tmp_path, code, CXX=str(broken)).communicate()
    assert "auto takes 'chunked'" in out
    assert "error: out of luck" in err.split("ValueError: ")[-1]
    assert not list((tmp_path / "dcformer").iterdir())


def test_the_cache_is_keyed_by_source_and_flags(monkeypatch):
    cxx = build.compiler()
    before = build.library_path(cxx)
    assert build.library_path(cxx) == before
    monkeypatch.setattr(build, "vector_flags", lambda: ["-DOTHER"])
    assert build.library_path(cxx) != before
