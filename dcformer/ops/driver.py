"""The driver: it walks over blocks of queries, makes the products and lets a `BlockMixer` mix; backward again.

    scores  = scale Q_block K_visible^T          batched GEMM
    weights = mix(scores, pre, post, mask)       the mixer's one pass
    out     = weights V_visible                  batched GEMM

Only one block of scores exists at a time, so memory is linear in the length. See README.md beside this file.

B batch, T queries, S keys, N heads, K key/value heads, H = N/K query heads a key head, D head dim, C queries of a block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import Call, within_documents

# Scores of one block, all heads. On a CPU they fit into the last-level cache with their few companions; on a GPU they take so
# long (some 0.1 ms) that the host launches the next block meanwhile. See README.md.
_CPU_BLOCK, _GPU_BLOCK = 1 << 21, 1 << 25
_CPU_MIN_QUERIES, _GPU_MIN_QUERIES = 28, 64


@dataclass
class Block:
    """What belongs to one block of queries, as views into the whole. Floats have the dtype of the scores.

    Attributes:
        pre, post: compositions with `query` [B, C, 2R+1, N] and `key` [B, S, 2R+1, N], or `None`. Rows of `base` and
            `query` are contiguous; `key` has stride 1 along S, and finite numbers up to the next multiple of the alignment.
        mask: bool (True = visible) or float (added), [B or 1, N or 1, C or 1, S or 1], or `None`.
        lower, upper: query c sees only the keys j with c + lower <= j < c + upper; `None` means no bound.
        dtype: of the products that follow. Weights and dscores are best made in it at once.
    """

    pre: Composition | None
    post: Composition | None
    mask: Tensor | None
    lower: int | None
    upper: int | None
    dtype: torch.dtype


@dataclass
class BlockGrads:
    """Where `mix_backward` adds its gradients: views of accumulators, with shapes, layout and dtype of the block's parts."""

    pre: Composition | None
    post: Composition | None
    mask: Tensor | None


class BlockMixer(ABC):
    """A mixer that mixes the scores of one block of queries; this class walks over the blocks and makes the products.

    Scores come already scaled, [B, N, C, S], in float32, or in float64 for float64 inputs. Rows of scores and of key-wise
    weights, and the first key of a block, lie at multiples of `alignment` elements.
    """

    name: str
    priority: int
    alignment = 1

    @abstractmethod
    def refuses(self, call: Call) -> str | None:
        """See `Mixer.refuses`."""

    @abstractmethod
    def mix_forward(self, scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Compose, mask, softmax, compose: the weights [B, N, C, S] and the row statistics [B, N, C, 2] of `Mixer.forward`.

        It may overwrite the scores.
        """

    @abstractmethod
    def mix_backward(
        self, scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
    ) -> tuple[Tensor, Tensor]:
        """The weights again and the gradient of the scores, both [B, N, C, S]; adds to `grads`. It may overwrite its inputs."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """See `Mixer.forward`."""
        return _forward(self, call)

    def backward(self, call: Call, grad_out: Tensor, statistics: Tensor, mask_needs_grad: bool) -> list[Tensor]:
        """See `Mixer.backward`. The scores are made again, block by block."""
        return _backward(self, call, grad_out, statistics, mask_needs_grad)


@dataclass(frozen=True)
class _Span:
    """One block: rows b of the batch, queries t, and the keys s that they see at most."""

    b: slice
    t: slice
    s: slice
    lower: int | None
    upper: int | None


def _block_size(device: torch.device, B: int) -> tuple[int, int, int]:
    """Scores of a block, about; the least queries of one, for the products; rows of the batch to have in one, where that fits.

    A GPU takes fewer queries of all rows rather than more of one, since it is the launches that cost.
    """
    if device.type == "cpu":
        return _CPU_BLOCK, _CPU_MIN_QUERIES, 1
    cached = 0
    if device.type == "cuda":
        # Scores in float32 and weights in half precision: a cache that holds more of them may.
        cached = torch.cuda.get_device_properties(device).L2_cache_size // 6
    return max(_GPU_BLOCK, cached), _GPU_MIN_QUERIES, B


def _spans(call: Call, alignment: int = 1) -> Iterator[_Span]:
    """The blocks that see any key, in the same order in forward and backward."""
    (B, N, T, _), S, window = call.query.shape, call.key.shape[2], call.window
    limit, least, together = _block_size(call.query.device, B)
    # Of the C + W keys that a block in a window sees, each query sees W: C beyond W would make masked scores mostly.
    most = T if window is None else max(least, window)
    widest = S if window is None else min(S, most + window)
    C = min(most, max(least, limit // max(1, together * N * widest)))
    C = max(1, min(C, T))
    rows = max(1, min(B, limit // max(1, N * C * widest)))
    for t0 in range(0, T, C):
        t1 = min(T, t0 + C)
        first, last = t0 + S - T, t1 - 1 + S - T  # positions of the block's first and last query
        s0 = 0 if window is None else min(S, max(0, first - window + 1)) // alignment * alignment
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


class _Mixing:
    """What a mixer is given, laid out once a call: in the dtype of the scores, key-wise weights contiguous along the keys."""

    def __init__(self, call: Call, alignment: int, operand_dtype: torch.dtype):
        self.dtype, self.alignment, self.operand_dtype = mixing_dtype(call.query.dtype), alignment, operand_dtype
        self.pre, self.post = (_laid_out(c, self.dtype, alignment) for c in (call.pre, call.post))
        self.mask = call.attn_mask
        if self.mask is not None and self.mask.dtype != torch.bool:
            self.mask = self.mask.to(self.dtype)
        self.documents, self.first = call.documents, call.key.shape[2] - call.query.shape[2]
        self.spans = list(_spans(call, alignment))
        self.heads, self.device = call.query.shape[1], call.query.device
        self._buffers: dict[str, Tensor] = {}

    def _shape(self, span: _Span) -> tuple[int, ...]:
        row = _aligned(span.s.stop - span.s.start, self.alignment)
        return span.b.stop - span.b.start, self.heads, span.t.stop - span.t.start, row

    def scores(self, name: str, span: _Span) -> Tensor:
        """The buffer of that name as the scores of a block, [B, N, C, S]; one for all blocks, since fresh pages are slow."""
        if name not in self._buffers:
            size = max(math.prod(self._shape(span)) for span in self.spans)
            self._buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        shape = self._shape(span)
        return self._buffers[name][: math.prod(shape)].view(shape)[..., : span.s.stop - span.s.start]

    def block(self, span: _Span) -> Block:
        pre, post, mask = _part(self.pre, span), _part(self.post, span), _mask_part(self.mask, span)
        if self.documents is not None:
            of_queries = self.documents[span.b, self.first + span.t.start : self.first + span.t.stop]
            mask = within_documents(mask, of_queries, self.documents[span.b, span.s])
        return Block(pre, post, mask, span.lower, span.upper, self.operand_dtype)


def _aligned(length: int, alignment: int) -> int:
    return -(-length // alignment) * alignment


def _along_keys(weights: Tensor, dtype: torch.dtype, alignment: int) -> Tensor:
    """Key-wise weights [B, S, 2R+1, N] with the keys innermost, and zeros behind the last up to the alignment."""
    B, S, rows, N = weights.shape
    out = weights.new_zeros(B, rows, N, _aligned(S, alignment), dtype=dtype).movedim(-1, 1)[:, :S]
    return out.copy_(weights)


def _laid_out(composition: Composition | None, dtype: torch.dtype, alignment: int) -> Composition | None:
    if composition is None:
        return None
    base, query, key, groups = composition
    return Composition(
        None if base is None else base.to(dtype).contiguous(),
        None if query is None else query.to(dtype).contiguous(),
        None if key is None else _along_keys(key, dtype, alignment),
        groups,
    )


def _fold_queries(x: Tensor, span: _Span, K: int) -> Tensor:
    """A block of queries [B, N, C, D], folded for the products with shared key heads: [B K, H C, D]."""
    return x[span.b, :, span.t].unflatten(1, (K, -1)).flatten(2, 3).flatten(0, 1)


def _fold_keys(x: Tensor, span: _Span) -> Tensor:
    """[B K, S visible, D]; a view of contiguous keys."""
    return x[span.b, :, span.s].flatten(0, 1)


def _product(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha a b of batched matrices."""
    out = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype, device=a.device)
    return out.baddbmm_(a, b, beta=0, alpha=alpha)


def _sums_in_float32(device: torch.device) -> bool:
    """Whether products of half precision can be written in float32, as they were summed."""
    return device.type == "cuda" and torch.version.cuda is not None


def _product_into(out: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0, beta: int = 0) -> None:
    """out = beta out + alpha a b; the factors may have a narrower dtype than `out`."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b, alpha=alpha, beta=beta)
    elif _sums_in_float32(out.device) and out.dtype == torch.float32:
        torch.ops.aten.baddbmm.dtype_out(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    elif beta:
        out.add_(_product(a, b, alpha))
    else:
        out.copy_(_product(a, b, alpha))


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def multiplies(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device is fast at products in this dtype: a CPU that lacks the instructions is slower than in float32."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")())


def _operands(*tensors: Tensor) -> list[Tensor]:
    """The factors of the products: in a dtype that the device multiplies, rows contiguous."""
    dtype = tensors[0].dtype if multiplies(tensors[0].device, tensors[0].dtype) else torch.float32
    return [_rows_contiguous(tensor.to(dtype)) for tensor in tensors]


def mixing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and accumulated gradients."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Dropout:
    """Dropout of a block's final weights in place, the same forward and backward: one generator, seeded anew for each block."""

    def __init__(self, seed: Tensor | None, p: float, device: torch.device):
        self.p = p
        self.seed = 0 if seed is None else int(seed)  # on the CPU, so nothing waits
        self.generator = None if seed is None else torch.Generator(device)

    def __call__(self, weights: Tensor, number: int) -> Tensor:
        if self.generator is None:
            return weights
        self.generator.manual_seed(self.seed + number)
        dropped = torch.rand(weights.shape, generator=self.generator, device=weights.device) < self.p
        return weights.masked_fill_(dropped, 0).mul_(1 / (1 - self.p) if self.p < 1 else 0)


def _forward(mixer: BlockMixer, call: Call) -> tuple[Tensor, Tensor]:
    query, key, value = _operands(call.query, call.key, call.value)
    mixing = _Mixing(call, mixer.alignment, query.dtype)
    (B, N, T, _), K = query.shape, key.shape[1]
    out = query.new_zeros(B, N, T, value.shape[3])
    statistics = query.new_zeros(B, N, T, 2, dtype=mixing.dtype)
    statistics[..., 1] = 1
    dropout = _Dropout(call.seed, call.dropout_p, query.device)
    for number, span in enumerate(mixing.spans):
        q, k, v = _fold_queries(query, span, K), _fold_keys(key, span), _fold_keys(value, span)
        scores = mixing.scores("scores", span)
        _product_into(scores.view(*q.shape[:2], -1), q, k.transpose(1, 2), call.scale)
        weights, statistics[span.b, :, span.t] = mixer.mix_forward(scores, mixing.block(span))
        weights = dropout(weights, number).reshape(*q.shape[:2], -1).to(v.dtype)
        out[span.b, :, span.t] = _product(weights, v).view(*scores.shape[:3], -1)
    return out.to(call.query.dtype), statistics


def _backward(mixer: BlockMixer, call: Call, grad_out: Tensor, statistics: Tensor, mask_needs_grad: bool) -> list[Tensor]:
    query, key, value, grad_out = _operands(call.query, call.key, call.value, grad_out)
    mixing = _Mixing(call, mixer.alignment, query.dtype)
    K, dtype = key.shape[1], mixing.dtype
    dquery, dkey, dvalue = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (query, key, value))
    dpre, dpost = (None if c is None else c.map(torch.zeros_like) for c in (mixing.pre, mixing.post))
    dmask = torch.zeros_like(mixing.mask) if mixing.mask is not None and mask_needs_grad else None
    dropout = _Dropout(call.seed, call.dropout_p, query.device)
    for number, span in enumerate(mixing.spans):
        q, k, v = _fold_queries(query, span, K), _fold_keys(key, span), _fold_keys(value, span)
        do = _fold_queries(grad_out, span, K)
        scores, dweights = mixing.scores("scores", span), mixing.scores("dweights", span)
        _product_into(scores.view(*q.shape[:2], -1), q, k.transpose(1, 2), call.scale)
        _product_into(dweights.view(*q.shape[:2], -1), do, v.transpose(1, 2))
        grads = BlockGrads(_part(dpre, span), _part(dpost, span), _mask_part(dmask, span))
        row_statistics = statistics[span.b, :, span.t].contiguous()
        weights, dscores = mixer.mix_backward(scores, dropout(dweights, number), row_statistics, mixing.block(span), grads)
        weights, dscores = (w.reshape(*q.shape[:2], -1).to(q.dtype) for w in (dropout(weights, number), dscores))
        dquery[span.b, :, span.t] = _product(dscores, k, call.scale).view(*scores.shape[:3], -1)
        _product_into(_fold_keys(dkey, span), dscores.transpose(1, 2), q, call.scale, beta=1)
        _product_into(_fold_keys(dvalue, span), weights.transpose(1, 2), do, beta=1)
    found = [dquery, dkey, dvalue, *(dpre or Composition())[:3], *(dpost or Composition())[:3], dmask]
    return [grad for grad in found if grad is not None]
