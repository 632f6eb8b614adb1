"""The Triton backend without a GPU: it says why it cannot serve, and its kernels are right in the interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcformer import composed_attention
from dcformer.ops import explain
from dcformer.testing import make_inputs


def test_named_without_a_gpu():
    inputs = make_inputs(T=5)
    with pytest.raises(ValueError, match="'triton' cannot serve this request: it runs on CUDA devices and query is on cpu"):
        composed_attention(*inputs.call(), backend="triton")
    assert explain(*inputs.call()).backend != "triton"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the package triton is not installed")
def test_in_the_interpreter():
    """In a process of its own, since Triton asks for the interpreter when kernels are defined."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "triton_interpreter.py", "triton_decoding.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
    result = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
