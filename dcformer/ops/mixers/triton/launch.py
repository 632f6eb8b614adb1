"""Launches the kernels for a block: tiles, strides, buffers.

B batch, C queries of the block, S keys, N heads = G groups of n, R rank.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.driver import Block, BlockGrads
from dcformer.ops.mixers.triton import forward

_FAR = 1 << 30  # a bound that no block reaches


def tile_of(heads: int) -> tuple[int, int]:
    """Queries and keys of a tile, for one warp: four pairs a thread where 32 heads of them fit into its registers."""
    return (8, 16) if heads <= 32 else (4, 16)


class _Side:
    """One composition as the kernels take it; without one every head is a group of its own."""

    def __init__(self, composition: Composition | None, scores: Tensor, block: Block):
        B, N, C, S = scores.shape
        composition = composition or Composition(groups=N)
        base, query, key = composition[:3]
        self.heads = N // composition.groups
        self.tile = tile_of(self.heads)
        BT, BS = self.tile
        self.tiles = triton.cdiv(C, BT), triton.cdiv(S, BS)
        self.grid = (self.tiles[0] * self.tiles[1] * B * composition.groups,)
        self.weights = base, query, key
        self.strides = (
            *((0, 0) if query is None else query.stride()[:2]),
            *((0, 0, 0) if key is None else (key.stride(0), key.stride(2), key.stride(3))),
        )
        lower = -_FAR if block.lower is None else block.lower
        upper = _FAR if block.upper is None else block.upper
        self.shape = C, S, composition.groups, lower, upper
        ranks = (0 if part is None else part.shape[2] // 2 for part in (query, key))
        self.constants = (self.heads, *ranks, *self.tile)


def _mask(block: Block) -> tuple[Tensor | None, tuple[int, ...]]:
    mask = block.mask
    if mask is None:
        return None, (0, 0, 0, 0)
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return (mask.view(torch.int8) if mask.dtype == torch.bool else mask), strides


def mix_forward(scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """See `BlockMixer.mix_forward`; the weights lie in the place of the scores."""
    B, N, C, _ = scores.shape
    pre, post = _Side(block.pre, scores, block), _Side(block.post, scores, block)
    partial = scores.new_empty(2, pre.tiles[1], B, N, C)
    mask, mask_strides = _mask(block)
    forward.compose_scores[pre.grid](
        scores, scores, partial, *pre.weights, mask, *pre.strides, *mask_strides, B, *pre.shape, *pre.constants, num_warps=1
    )
    statistics = scores.new_empty(B, N, C, 2)
    rows = B * N * C
    forward.unite_statistics[(triton.cdiv(rows, 128),)](partial, statistics, rows, pre.tiles[1], 128, num_warps=4)
    forward.compose_weights[post.grid](
        scores, statistics, *post.weights, *post.strides, *post.shape, *post.constants, num_warps=1
    )
    return scores, statistics


def mix_backward(
    scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
) -> tuple[Tensor, Tensor]:
    """See `BlockMixer.mix_backward`."""
    raise NotImplementedError
