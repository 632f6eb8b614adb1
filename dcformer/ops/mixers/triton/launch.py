"""Launches the kernels for a block: tiles, strides, buffers for partial sums.

B batch, C queries of the block, S keys, N heads = G groups of n, R rank; tiles as in compose.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.driver import Block, BlockGrads
from dcformer.ops.mixers.triton import backward, forward
from dcformer.ops.mixers.triton.tuning import choose

_FAR = 1 << 30  # a bound that no block reaches
_TIMED = 1 << 22  # scores of a block that fill a device: times of fewer say nothing about tiles


class Tile(NamedTuple):
    """Heads, padded; queries of a program; queries and keys of a tile; warps that share a tile."""

    NP: int
    CHUNK: int
    BT: int
    BS: int
    warps: int = 1


def tiles_of(heads: int, rank: int, has_base: bool, backward: bool) -> list[Tile]:
    """The tiles to choose from: what registers hold, spilling the least; the best guess first, then wider, then smaller ones.

    Forward that is 32 scores a thread, fewer with higher ranks, more heads, or products with static weights. Backward it is 8,
    and beside them 40 sums of gradients of key-wise weights. Static weights want registers for n x n numbers too.
    """
    NP = max(triton.next_power_of_2(heads), 16 if has_base else 1)  # a product on tensor cores takes 16 at least
    if backward:
        most = (1 << (1280 // max(5, 2 * rank + 1)).bit_length() - 1) >> has_base
        widest, chunk = 32, 32
    else:
        most = 1024 >> (rank > 2) >> (heads > 32) >> 2 * has_base
        widest, chunk = min(32, max(1, 512 // NP)), 16
    least = 8 if has_base else 4
    BS = max(least, min(widest, most // NP))
    warps = max(1, NP // (8 if backward else 32)) if has_base else 1
    tiles = [Tile(NP, chunk, max(1, min(8, most // (NP * BS))), BS, warps)]
    if not has_base:
        tiles.append(tiles[0]._replace(BS=2 * BS, warps=2))
    smaller = tiles[0]
    for _ in range(2):
        smaller = smaller._replace(BT=smaller.BT // 2) if smaller.BT > 1 else smaller._replace(BS=max(least, smaller.BS // 2))
        tiles.append(smaller)
    return list(dict.fromkeys(tiles))


class _Problem:
    """What all kernels of a block take: shapes, weights and strides of both sides, the mask, the tile."""

    def __init__(self, scores: Tensor, block: Block, tile: Tile):
        B, N, C, S = scores.shape
        pre, post = block.pre or Composition(), block.post or Composition()
        groups = pre.groups if block.pre is not None else post.groups if block.post is not None else N
        lower = -_FAR if block.lower is None else max(-_FAR, block.lower)
        upper = _FAR if block.upper is None else min(_FAR, block.upper)
        self.shape = (C, S, scores.stride(2), lower, upper)
        self.pre, self.post = pre[:3], post[:3]
        self.pre_strides, self.post_strides = _strides(pre), _strides(post)
        self.pre_ranks, self.post_ranks = _ranks(pre), _ranks(post)
        self.heads = (groups, N // groups)
        mask = block.mask
        self.mask = mask.view(torch.int8) if mask is not None and mask.dtype == torch.bool else mask
        self.mask_strides = (0, 0, 0, 0) if mask is None else _broadcast_strides(mask)
        tile = tile._replace(BT=min(tile.BT, triton.next_power_of_2(C)))
        self.sizes, self.warps = tile[:4], tile.warps
        self.tiles, self.chunks = triton.cdiv(S, tile.BS), triton.cdiv(C, tile.CHUNK)
        self.grid = (self.tiles * self.chunks * B * groups,)


def _tile(scores: Tensor, block: Block, backward: bool, trial: Callable[[], Callable[[Tile], object]]) -> Tile:
    """The tile for a block. `trial` makes what runs the block on copies with a given tile."""
    sides = [side for side in (block.pre, block.post) if side is not None]
    heads = scores.shape[1] // sides[0].groups if sides else 1
    ranks = tuple(_ranks(side) for side in sides)
    bases = tuple(side.base is not None for side in sides)
    tiles = tiles_of(heads, max((r for rank in ranks for r in rank), default=0), any(bases), backward)
    problem = (backward, heads, ranks, bases, block.dtype, block.mask is not None, scores.shape[2] == 1)
    return choose(problem, tiles, trial, scores.device, timed=scores.numel() >= _TIMED)


def _strides(composition: Composition) -> tuple[int, ...]:
    """Of batch and length of the query-wise weights; of batch, row and head of the key-wise ones."""
    query, key = composition.query, composition.key
    of_query = (0, 0) if query is None else query.stride()[:2]
    return (*of_query, *((0, 0, 0) if key is None else (key.stride(0), key.stride(2), key.stride(3))))


def _ranks(composition: Composition) -> tuple[int, int]:
    query, key = (0 if part is None else part.shape[2] // 2 for part in (composition.query, composition.key))
    return query, key


def _broadcast_strides(mask: Tensor) -> tuple[int, ...]:
    return tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))


def _like(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty tensor of another dtype whose rows are as far apart as those of the scores."""
    B, N, C, S = scores.shape
    return torch.empty(B, N, C, scores.stride(2), dtype=dtype, device=scores.device)[..., :S]


def mix_forward(scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """See `BlockMixer.mix_forward`."""

    def trial() -> Callable[[Tile], object]:
        copy = _like(scores, scores.dtype).copy_(scores)
        return lambda tile: _forward(copy, block, tile)

    return _forward(scores, block, _tile(scores, block, False, trial))


def _forward(scores: Tensor, block: Block, tile: Tile) -> tuple[Tensor, Tensor]:
    """Composed scores lie in the place of the scores."""
    problem = _Problem(scores, block, tile)
    B, N, C, _ = scores.shape
    partial = scores.new_zeros(2, problem.tiles, B, N, C)
    constants = (*problem.pre_ranks, *problem.sizes)
    forward.compose_scores[problem.grid](
        scores, partial, *problem.pre, problem.mask, *problem.pre_strides, *problem.mask_strides,
        B, *problem.shape, *problem.heads, *constants, num_warps=problem.warps,
    )  # fmt: skip
    statistics = scores.new_empty(B, N, C, 2)
    rows = B * N * C
    forward.unite_statistics[(triton.cdiv(rows, 32),)](partial, statistics, rows, problem.tiles, 32, 32, num_warps=4)
    weights = _like(scores, block.dtype)
    constants = (*problem.post_ranks, *problem.sizes)
    forward.compose_weights[problem.grid](
        scores, statistics, weights, *problem.post, *problem.post_strides,
        *problem.shape, *problem.heads, *constants, num_warps=problem.warps,
    )  # fmt: skip
    return weights, statistics


class _Partials:
    """Sums of gradients of one side, a tile of keys or a chunk of queries each, to be added up."""

    def __init__(self, problem: _Problem, scores: Tensor, grads: Composition | None, ranks: tuple[int, int]):
        B, N, C, S = scores.shape
        G, n = problem.heads
        self.grads = base, query, key = (grads or Composition())[:3]
        rows = tuple(2 * rank + 1 for rank in ranks)
        tiles, chunks = problem.tiles, problem.chunks
        self.base = None if base is None else scores.new_zeros(tiles * chunks * B, G, n, n)
        self.query = None if query is None else scores.new_zeros(tiles, B, C, rows[0], N)
        self.key = None if key is None else scores.new_zeros(chunks, B, rows[1], N, S)
        self.all = self.base, self.query, self.key

    def add(self) -> None:
        for grad, partial in zip(self.grads[:2], self.all[:2], strict=True):
            if grad is not None and partial is not None:
                grad.add_(partial.sum(0))
        if self.grads[2] is not None and self.key is not None:
            self.grads[2].add_(self.key.sum(0).movedim(-1, 1))


def mix_backward(
    scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
) -> tuple[Tensor, Tensor]:
    """See `BlockMixer.mix_backward`."""

    def trial() -> Callable[[Tile], object]:
        copy = _like(dweights, dweights.dtype).copy_(dweights)
        pre, post = (None if side is None else side.map(torch.zeros_like) for side in (grads.pre, grads.post))
        scratch = BlockGrads(pre, post, None if grads.mask is None else torch.zeros_like(grads.mask))
        return lambda tile: _backward(scores, copy, statistics, block, scratch, tile)

    return _backward(scores, dweights, statistics, block, grads, _tile(scores, block, True, trial))


def _backward(
    scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads, tile: Tile
) -> tuple[Tensor, Tensor]:
    """The gradient of p lies in the place of `dweights`, and that of the mask after it."""
    problem = _Problem(scores, block, tile)
    B, N, C, _ = scores.shape
    delta = scores.new_zeros(problem.tiles, B, N, C)
    weights, dscores = (_like(scores, block.dtype) for _ in range(2))
    of_post = _Partials(problem, scores, grads.post, problem.post_ranks)
    backward.backward_of_post[problem.grid](
        scores, statistics, dweights, weights, delta, problem.mask,
        *problem.pre, *problem.post, *of_post.all,
        *problem.pre_strides, *problem.post_strides, *problem.mask_strides,
        B, *problem.shape, *problem.heads, *problem.pre_ranks, *problem.post_ranks, *problem.sizes, num_warps=problem.warps,
    )  # fmt: skip
    of_post.add()
    of_pre = _Partials(problem, scores, grads.pre, problem.pre_ranks)
    da = None if grads.mask is None else dweights
    backward.backward_of_pre[problem.grid](
        scores, statistics, dweights, delta.sum(0), dscores, da, problem.mask,
        *problem.pre, *of_pre.all, *problem.pre_strides, *problem.mask_strides,
        B, *problem.shape, *problem.heads, *problem.pre_ranks, *problem.sizes, num_warps=problem.warps,
    )  # fmt: skip
    of_pre.add()
    if grads.mask is not None:
        grads.mask.add_(dweights.sum_to_size(grads.mask.shape))
    return weights, dscores
