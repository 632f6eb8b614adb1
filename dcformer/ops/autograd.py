"""Composed attention as two operators of PyTorch, with shapes for the compiler and a backward for autograd.

Registered operators are opaque to `torch.compile`: block loops are not unrolled and a new length compiles nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.driver import mixing_dtype
from dcformer.ops.mixers import MIXERS, Call


def _composition(base: Tensor | None, query: Tensor | None, key: Tensor | None, groups: int) -> Composition | None:
    composition = Composition(base, query, key, groups)
    return None if composition.is_identity else composition


@torch.library.custom_op("dcformer::composed_attention", mutates_args=())
def composed_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre_base: Tensor | None,
    pre_query: Tensor | None,
    pre_key: Tensor | None,
    post_base: Tensor | None,
    post_query: Tensor | None,
    post_key: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    documents: Tensor | None,
    pre_groups: int,
    post_groups: int,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
    mixer: str,
) -> tuple[Tensor, Tensor]:
    """Output [B, N, T, D] and the row statistics [B, N, T, 2]. `seed` is an int64 scalar on the CPU, given with dropout."""
    pre = _composition(pre_base, pre_query, pre_key, pre_groups)
    post = _composition(post_base, post_query, post_key, post_groups)
    call = Call(query, key, value, pre, post, attn_mask, seed, is_causal, window, scale, dropout_p, documents)
    with torch.autocast(query.device.type, enabled=False):  # the products inside have chosen their dtypes
        return MIXERS[mixer].forward(call)


@composed_attention_op.register_fake
def _(query, key, value, *_args):  # type: ignore[no-untyped-def]
    B, N, T, _ = query.shape
    statistics = query.new_empty((B, N, T, 2), dtype=mixing_dtype(query.dtype))
    return query.new_empty((B, N, T, value.shape[3])), statistics


@torch.library.custom_op("dcformer::composed_attention_backward", mutates_args=())
def composed_attention_backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre_base: Tensor | None,
    pre_query: Tensor | None,
    pre_key: Tensor | None,
    post_base: Tensor | None,
    post_query: Tensor | None,
    post_key: Tensor | None,
    attn_mask: Tensor | None,
    seed: Tensor | None,
    documents: Tensor | None,
    statistics: Tensor,
    mask_needs_grad: bool,
    pre_groups: int,
    post_groups: int,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
    mixer: str,
) -> list[Tensor]:
    """Gradients of those of query, key, value, the six parts and the mask that are there, in this order."""
    pre = _composition(pre_base, pre_query, pre_key, pre_groups)
    post = _composition(post_base, post_query, post_key, post_groups)
    call = Call(query, key, value, pre, post, attn_mask, seed, is_causal, window, scale, dropout_p, documents)
    with torch.autocast(query.device.type, enabled=False):
        grads = MIXERS[mixer].backward(call, grad_out, statistics, mask_needs_grad)
    return [grad.to(query.dtype).contiguous() for grad in grads]


@composed_attention_backward_op.register_fake
def _(grad_out, query, key, value, *args):  # type: ignore[no-untyped-def]
    parts, attn_mask, mask_needs_grad = args[:6], args[6], args[10]
    present = [query, key, value, *(part for part in parts if part is not None)]
    if mask_needs_grad:
        present.append(attn_mask)
    return [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in present]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.settings = inputs[12:]
    ctx.present = [tensor is not None for tensor in inputs[:10]]
    ctx.save_for_backward(*inputs[:12], output[1])


def _backward(ctx: Any, grad_out: Tensor, _grad_statistics: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, statistics = ctx.saved_tensors
    mask_needs_grad = ctx.needs_input_grad[9]
    grads = iter(composed_attention_backward_op(grad_out, *tensors, statistics, mask_needs_grad, *ctx.settings))
    there = [*ctx.present[:9], mask_needs_grad]
    return *(next(grads) if present else None for present in there), *([None] * (2 + len(ctx.settings)))


composed_attention_op.register_autograd(_backward, setup_context=_setup_context)
