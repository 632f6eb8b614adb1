"""The driver that all fast backends share: it walks over blocks of queries, makes the products and owns autograd.

    scores  = scale Q_block K_visible^T          batched GEMM
    weights = mix(scores, pre, post, mask)       the mixer's one pass
    out     = weights V_visible                  batched GEMM

Only one block of scores exists at a time, so memory is linear in the length. See README.md beside this file.

B batch, T queries, S keys, N heads, K key/value heads, H = N/K query heads a key head, D head dim, C queries of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import MIXERS, Block, BlockGrads

# Scores of one block, all heads: small enough for the last-level cache with its few companions.
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}
_MIN_QUERIES = 16


@dataclass(frozen=True)
class _Span:
    """One block: rows b of the batch, queries t, and the keys s that they see at most."""

    b: slice
    t: slice
    s: slice
    lower: int | None
    upper: int | None


def _spans(B: int, N: int, T: int, S: int, is_causal: bool, window: int | None, device: str) -> Iterator[_Span]:
    limit = _BLOCK_ELEMENTS.get(device, _BLOCK_ELEMENTS["cuda"])
    widest = S if window is None else min(S, 2 * window)
    C = max(1, min(T, max(_MIN_QUERIES, limit // max(1, N * widest))))
    rows = max(1, min(B, limit // max(1, N * C * widest)))
    for t0 in range(0, T, C):
        t1 = min(T, t0 + C)
        first, last = t0 + S - T, t1 - 1 + S - T  # positions of the block's first and last query
        s0 = 0 if window is None else min(S, max(0, first - window + 1))
        s1 = S if window is None else min(S, last + window)
        if is_causal:
            s1 = min(s1, last + 1)
        if s1 <= s0:
            continue
        lower = None if window is None else first - window + 1 - s0
        upper = None if window is None else first + window - s0
        if is_causal:
            upper = first + 1 - s0
        for b0 in range(0, B, rows):
            yield _Span(slice(b0, min(B, b0 + rows)), slice(t0, t1), slice(s0, s1), lower, upper)


def _part(composition: Composition | None, span: _Span) -> Composition | None:
    if composition is None:
        return None
    query = None if composition.query is None else composition.query[span.b, span.t]
    key = None if composition.key is None else composition.key[span.b, span.s]
    return Composition(composition.base, query, key, composition.groups)


def _mask_part(mask: Tensor | None, span: _Span) -> Tensor | None:
    """The block's part of a 4-D mask; dimensions of size 1 stay as they are."""
    if mask is None:
        return None
    b = span.b if mask.shape[0] > 1 else slice(None)
    t = span.t if mask.shape[2] > 1 else slice(None)
    s = span.s if mask.shape[3] > 1 else slice(None)
    return mask[b, :, t, s]


def _block(pre: Composition | None, post: Composition | None, mask: Tensor | None, span: _Span) -> Block:
    return Block(_part(pre, span), _part(post, span), _mask_part(mask, span), span.lower, span.upper)


def _fold_queries(x: Tensor, span: _Span, K: int) -> Tensor:
    """A block of queries [B, N, C, D], folded for the products with shared key heads: [B K, H C, D]."""
    return x[span.b, :, span.t].unflatten(1, (K, -1)).flatten(2, 3).flatten(0, 1)


def _fold_keys(x: Tensor, span: _Span) -> Tensor:
    """[B K, S visible, D]; a view of contiguous keys."""
    return x[span.b, :, span.s].flatten(0, 1)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, alpha: float = 1.0) -> Tensor:
    """alpha a b of batched matrices, in `dtype`."""
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out).to(dtype)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def mixing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and accumulated gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Dropout:
    """Dropout of a block's final weights, the same in forward and backward: one generator a block."""

    def __init__(self, seed: Tensor | None, p: float, device: torch.device):
        self.seed = 0 if seed is None else int(seed)
        self.p = p
        self.generator = torch.Generator(device) if p > 0 else None

    def factor(self, shape: torch.Size, like: Tensor, number: int) -> Tensor:
        """0 where dropped, 1/(1-p) where kept."""
        assert self.generator is not None
        self.generator.manual_seed(self.seed + number)
        keep = torch.rand(shape, generator=self.generator, device=like.device) >= self.p
        return keep.to(like.dtype).div_(1 - self.p) if self.p < 1 else torch.zeros_like(like)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    mask: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
    mixer_name: str,
) -> tuple[Tensor, Tensor]:
    """The output [B, N, T, D] and the log of each row's normaliser [B, N, T], +inf for a row without visible keys."""
    mixer = MIXERS[mixer_name]
    (B, N, T, _), K, S = query.shape, key.shape[1], key.shape[2]
    dtype = mixing_dtype(query.dtype)
    query, key, value = map(_rows_contiguous, (query, key, value))
    out = query.new_zeros(B, N, T, value.shape[3])
    normaliser = torch.full((B, N, T), math.inf, dtype=dtype, device=query.device)
    dropout = _Dropout(seed, dropout_p, query.device)
    for number, span in enumerate(_spans(B, N, T, S, is_causal, window, query.device.type)):
        q, k, v = _fold_queries(query, span, K), _fold_keys(key, span), _fold_keys(value, span)
        shape = (span.b.stop - span.b.start, N, span.t.stop - span.t.start, -1)
        scores = _product(q, k.transpose(1, 2), dtype, scale).view(shape)
        weights, normaliser[span.b, :, span.t] = mixer.mix_forward(scores, _block(pre, post, mask, span))
        if dropout_p > 0:
            weights = weights * dropout.factor(weights.shape, weights, number)
        folded = weights.reshape(q.shape[0], q.shape[1], -1).to(v.dtype)
        out[span.b, :, span.t] = _product(folded, v, v.dtype).view(shape)
    return out, normaliser


def _accumulators(composition: Composition | None, dtype: torch.dtype) -> Composition | None:
    if composition is None:
        return None
    parts = (None if part is None else torch.zeros(part.shape, dtype=dtype, device=part.device) for part in composition[:3])
    return Composition(*parts, composition.groups)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    mask: Tensor | None,
    seed: Tensor | None,
    normaliser: Tensor,
    mask_needs_grad: bool,
    is_causal: bool,
    window: int | None,
    scale: float,
    dropout_p: float,
    mixer_name: str,
) -> tuple[Tensor, Tensor, Tensor, Composition | None, Composition | None, Tensor | None]:
    """Gradients of query, key, value, pre, post and (where `mask_needs_grad`) the mask; scores are made again."""
    mixer = MIXERS[mixer_name]
    (B, N, T, _), K, S = query.shape, key.shape[1], key.shape[2]
    dtype = mixing_dtype(query.dtype)
    query, key, value, grad_out = map(_rows_contiguous, (query, key, value, grad_out))
    dquery = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    dkey, dvalue = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (key, value))
    dpre, dpost = _accumulators(pre, dtype), _accumulators(post, dtype)
    dmask = torch.zeros(mask.shape, dtype=dtype, device=mask.device) if mask is not None and mask_needs_grad else None
    dropout = _Dropout(seed, dropout_p, query.device)
    for number, span in enumerate(_spans(B, N, T, S, is_causal, window, query.device.type)):
        q, k, v = _fold_queries(query, span, K), _fold_keys(key, span), _fold_keys(value, span)
        do = _fold_queries(grad_out, span, K)
        shape = (span.b.stop - span.b.start, N, span.t.stop - span.t.start, -1)
        scores = _product(q, k.transpose(1, 2), dtype, scale).view(shape)
        dweights = _product(do, v.transpose(1, 2), dtype).view(shape)
        factor = dropout.factor(dweights.shape, dweights, number) if dropout_p > 0 else None
        if factor is not None:
            dweights = dweights * factor
        grads = BlockGrads(_part(dpre, span), _part(dpost, span), _mask_part(dmask, span))
        weights, dscores = mixer.mix_backward(
            scores, dweights, normaliser[span.b, :, span.t], _block(pre, post, mask, span), grads
        )
        if factor is not None:
            weights = weights * factor
        weights, dscores = (w.reshape(q.shape[0], q.shape[1], -1).to(q.dtype) for w in (weights, dscores))
        dquery[span.b, :, span.t] = _product(dscores, k, q.dtype, scale).view(shape)
        _add_folded(dkey, span, _product(dscores.transpose(1, 2), q, dtype, scale))
        _add_folded(dvalue, span, _product(weights.transpose(1, 2), do, dtype))
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), dpre, dpost, dmask


def _add_folded(total: Tensor, span: _Span, part: Tensor) -> None:
    target = total[span.b, :, span.s]
    target.add_(part.view(target.shape))
