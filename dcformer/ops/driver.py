"""The driver that all fast backends share: it walks over blocks of queries, makes the products and owns autograd.

    scores  = scale Q_block K_visible^T          batched GEMM
    weights = mix(scores, pre, post, mask)       the mixer's one pass
    out     = weights V_visible                  batched GEMM

Only one block of scores exists at a time, so memory is linear in the length. See README.md beside this file.

B batch, T queries, S keys, N heads, K key/value heads, H = N/K query heads a key head, D head dim, C queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import MIXERS, Block, BlockGrads

# Scores of one block, all heads: small enough for the last-level cache with its few companions.
_CPU_BLOCK, _GPU_BLOCK = 1 << 20, 1 << 25
_MIN_QUERIES = 16


class Call(NamedTuple):
    """What one call of the operator is about; the shapes are those of `dcformer.composed_attention`, masks are 4-D.

    `seed` is an int64 scalar on the CPU, given where `dropout_p` is above 0. `mixer` is a name in `MIXERS`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pre: Composition | None
    post: Composition | None
    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    window: int | None
    scale: float
    dropout_p: float
    mixer: str


@dataclass(frozen=True)
class _Span:
    """One block: rows b of the batch, queries t, and the keys s that they see at most."""

    b: slice
    t: slice
    s: slice
    lower: int | None
    upper: int | None


def _spans(call: Call) -> Iterator[_Span]:
    """The blocks that see any key, in the same order in forward and backward."""
    (B, N, T, _), S, window = call.query.shape, call.key.shape[2], call.window
    limit = _CPU_BLOCK if call.query.device.type == "cpu" else _GPU_BLOCK
    widest = S if window is None else min(S, 2 * window)
    C = max(1, min(T, max(_MIN_QUERIES, limit // max(1, N * widest))))
    rows = max(1, min(B, limit // max(1, N * C * widest)))
    for t0 in range(0, T, C):
        t1 = min(T, t0 + C)
        first, last = t0 + S - T, t1 - 1 + S - T  # positions of the block's first and last query
        s0 = 0 if window is None else min(S, max(0, first - window + 1))
        s1 = S if window is None else min(S, last + window)
        if call.is_causal:
            s1 = min(s1, last + 1)
        if s1 <= s0:
            continue
        lower = None if window is None else first - window + 1 - s0
        upper = None if window is None else first + window - s0
        if call.is_causal:
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


def _block(call: Call, span: _Span) -> Block:
    return Block(_part(call.pre, span), _part(call.post, span), _mask_part(call.mask, span), span.lower, span.upper)


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


def _multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device is fast at products in this dtype: a CPU that lacks the instructions is slower than in float32."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")())


def _operands(*tensors: Tensor) -> list[Tensor]:
    """The factors of the products: in a dtype that the device multiplies, rows contiguous."""
    dtype = tensors[0].dtype if _multiplies(tensors[0].device, tensors[0].dtype) else torch.float32
    return [_rows_contiguous(tensor.to(dtype)) for tensor in tensors]


def mixing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and accumulated gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Dropout:
    """Dropout of a block's final weights, the same in forward and backward: one generator, seeded anew for each block."""

    def __init__(self, seed: Tensor | None, p: float, device: torch.device):
        self.seed, self.p, self.generator = seed, p, torch.Generator(device)

    def __call__(self, weights: Tensor, number: int) -> Tensor:
        if self.seed is None:
            return weights
        self.generator.manual_seed(int(self.seed) + number)
        dropped = torch.rand(weights.shape, generator=self.generator, device=weights.device) < self.p
        return weights.masked_fill(dropped, 0) * (1 / (1 - self.p) if self.p < 1 else 0)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """The output [B, N, T, D] and the row statistics [B, N, T, 2] of `Mixer.mix_forward`."""
    mixer = MIXERS[call.mixer]
    query, key, value = _operands(call.query, call.key, call.value)
    (B, N, T, _), K = query.shape, key.shape[1]
    dtype = mixing_dtype(call.query.dtype)
    out = query.new_zeros(B, N, T, value.shape[3])
    statistics = torch.tensor([0, 1], dtype=dtype, device=query.device).repeat(B, N, T, 1)
    dropout = _Dropout(call.seed, call.dropout_p, query.device)
    for number, span in enumerate(_spans(call)):
        q, k, v = _fold_queries(query, span, K), _fold_keys(key, span), _fold_keys(value, span)
        shape = (span.b.stop - span.b.start, N, span.t.stop - span.t.start, -1)
        scores = _product(q, k.transpose(1, 2), dtype, call.scale).view(shape)
        weights, statistics[span.b, :, span.t] = mixer.mix_forward(scores, _block(call, span))
        weights = dropout(weights, number)
        folded = weights.reshape(q.shape[0], q.shape[1], -1).to(v.dtype)
        out[span.b, :, span.t] = _product(folded, v, v.dtype).view(shape)
    return out.to(call.query.dtype), statistics


def backward(
    call: Call, grad_out: Tensor, statistics: Tensor, mask_needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Composition | None, Composition | None, Tensor | None]:
    """Gradients of query, key, value, pre, post and (where `mask_needs_grad`) the mask, in `mixing_dtype`.

    The scores are made again, block by block.
    """
    mixer = MIXERS[call.mixer]
    query, key, value, grad_out = _operands(call.query, call.key, call.value, grad_out)
    N, K = query.shape[1], key.shape[1]
    dtype = mixing_dtype(call.query.dtype)

    def zeros(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)

    dquery, dkey, dvalue = zeros(query), zeros(key), zeros(value)
    dpre, dpost = (None if c is None else c.map(zeros) for c in (call.pre, call.post))
    dmask = zeros(call.mask) if call.mask is not None and mask_needs_grad else None
    dropout = _Dropout(call.seed, call.dropout_p, query.device)
    for number, span in enumerate(_spans(call)):
        q, k, v = _fold_queries(query, span, K), _fold_keys(key, span), _fold_keys(value, span)
        do = _fold_queries(grad_out, span, K)
        shape = (span.b.stop - span.b.start, N, span.t.stop - span.t.start, -1)
        scores = _product(q, k.transpose(1, 2), dtype, call.scale).view(shape)
        dweights = dropout(_product(do, v.transpose(1, 2), dtype).view(shape), number)
        grads = BlockGrads(_part(dpre, span), _part(dpost, span), _mask_part(dmask, span))
        row_statistics = statistics[span.b, :, span.t]
        weights, dscores = mixer.mix_backward(scores, dweights, row_statistics, _block(call, span), grads)
        weights = dropout(weights, number)
        weights, dscores = (w.reshape(q.shape[0], q.shape[1], -1).to(q.dtype) for w in (weights, dscores))
        dquery[span.b, :, span.t] = _product(dscores, k, dtype, call.scale).view(shape)
        _add_folded(dkey, span, _product(dscores.transpose(1, 2), q, dtype, call.scale))
        _add_folded(dvalue, span, _product(weights.transpose(1, 2), do, dtype))
    return dquery, dkey, dvalue, dpre, dpost, dmask


def _add_folded(total: Tensor, span: _Span, part: Tensor) -> None:
    target = total[span.b, :, span.s]
    target.add_(part.view(target.shape))
