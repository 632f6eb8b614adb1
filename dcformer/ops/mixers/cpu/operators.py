"""Loads the operators `dcformer_cpu::forward` and `dcformer_cpu::backward`; with their shapes they may be traced by themselves.

B batch, T queries, N heads.
"""

from __future__ import annotations

import functools
import threading
import warnings

import torch
from torch import Tensor

from dcformer.ops.mixers.cpu import build

_lock = threading.Lock()


@torch.compiler.assume_constant_result
def why_not() -> str | None:
    """Makes the operators available, building them at first use. Returns why that failed, or `None`."""
    with _lock:
        return _load()


@functools.cache
def _load() -> str | None:
    try:
        torch.ops.load_library(str(build.library()))
    except (build.BuildError, OSError) as error:
        warnings.warn(f"dcformer takes the slower backend 'chunked' on the CPU: {error}", stacklevel=2)
        return str(error)
    torch.library.register_fake("dcformer_cpu::forward", _fake_forward)
    torch.library.register_fake("dcformer_cpu::backward", _fake_backward)
    return None


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    B, N, T, _ = query.shape
    return query.new_empty((B, N, T, value.shape[3])), query.new_empty((B, N, T, 2), dtype=torch.float32)


def _fake_backward(grad_out: Tensor, *arguments: Tensor | None) -> list[Tensor]:
    parts, mask, mask_needs_grad = arguments[:9], arguments[9], arguments[12]
    present = [part for part in (*parts, mask if mask_needs_grad else None) if part is not None]
    return [part.new_empty(part.shape, dtype=torch.float32) for part in present]
