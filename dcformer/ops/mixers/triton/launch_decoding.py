"""Launches the decoding kernels: which calls they serve, tiles, splits, strides. No copies, nothing waits for the device.

B batch, T queries, S keys, N heads = G groups of n, K key heads of H query heads, D and E channels of a key and of a value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import Call
from dcformer.ops.mixers.triton import decoding
from dcformer.ops.mixers.triton.launch import _FAR, _broadcast_strides, _ranks

_MOST_QUERIES = 8  # with more, outputs of single splits are more bytes than values
_MOST_ROWS = 64  # of a product: the queries of all heads that share a key head
_MOST_CHANNELS = 256


def _groups(call: Call) -> int:
    sides = [side for side in (call.pre, call.post) if side is not None]
    return sides[0].groups if sides else call.query.shape[1]


def serves(call: Call) -> bool:
    """Whether the queries are so few that a program takes all of them, without dropout, documents and gradients.

    For gradients the driver makes the scores again, and softmax is best undone on the same bits that it was done on.
    """
    (B, N, T, D), (K, S, E) = call.query.shape, call.value.shape[1:]
    fits = T <= _MOST_QUERIES and N // K * T <= _MOST_ROWS and max(D, E) <= _MOST_CHANNELS and min(B, T, S, E) > 0
    fits = fits and N * T * S < 1 << 30  # offsets among the scores of a group take 32 bits: registers are short
    return fits and call.documents is None and call.dropout_p == 0 and not call.query.requires_grad


class Tile(NamedTuple):
    """Heads and queries of a tile that composes, rows of one that multiplies, and keys of both."""

    NP: int
    BT: int
    BM: int
    BS: int


def tile_of(call: Call) -> Tile:
    """The tile for eight warps, at small sizes four: what their registers hold without spilling."""
    (_, N, T, D), (K, _, E) = call.query.shape, call.value.shape[1:]
    sides = [side for side in (call.pre, call.post) if side is not None]
    has_base = any(side.base is not None for side in sides)
    rank = max((max(_ranks(side)) for side in sides), default=0)
    NP = max(triton.next_power_of_2(N // _groups(call)), 16 if has_base else 1)  # a product on tensor cores takes 16 at least
    most = 2048 >> 2 * has_base >> (rank > 2)
    wide = call.query.dtype == torch.float32 or max(D, E) > 128
    BS = max(16, min(16 if wide else 32, most // NP))
    return Tile(NP, max(1, min(triton.next_power_of_2(T), most // (NP * BS))), max(16, triton.next_power_of_2(N // K * T)), BS)


def _programs(device: torch.device) -> int:
    """How many programs keep the device's memory busy."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _weights(composition: Composition) -> tuple[list[Tensor | None], tuple[int, ...]]:
    """Base, query-wise and key-wise weights, and the strides of the last two."""
    base, query, key = composition[:3]
    none = (0, 0, 0, 0)
    strides = (*(none if query is None else query.stride()), *(none if key is None else key.stride()))
    return [None if base is None else base.contiguous(), query, key], strides


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """See `Mixer.forward`, for a call that `serves`."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    (B, N, T, D), (K, S, E) = query.shape, value.shape[1:]
    pre, post = call.pre or Composition(), call.post or Composition()
    tile = tile_of(call)
    BD, BE = (max(16, triton.next_power_of_2(size)) for size in (D, E))
    warps = 4 if tile.NP * max(BD, BE) <= 1024 else 8  # with eight the assembler takes 64 registers here, and spills
    G = _groups(call)
    heads = (G, N // G, N // K)

    first, window = S - T, call.window  # the position of the first query
    start = 0 if window is None else max(0, first - window + 1)
    stop = S if window is None or call.is_causal else min(S, S - 1 + window)
    lower = -_FAR if window is None else max(-_FAR, first - window + 1)
    upper = first + 1 if call.is_causal else _FAR if window is None else min(_FAR, first + window)

    tiles = triton.cdiv(stop - start, tile.BS)
    length = tile.BS * triton.cdiv(tiles, max(1, _programs(query.device) // (B * G)))
    splits = triton.cdiv(stop - start, length)
    grid = (splits * B * G,)
    keys = (splits, start, stop, length)

    scores = query.new_empty(B, N, T, splits * length, dtype=torch.float32)
    partial = query.new_empty(2, B, N, T, splits, dtype=torch.float32)
    weights, strides = _weights(pre)
    mask_strides = (0, 0, 0, 0) if mask is None else _broadcast_strides(mask)
    mask = mask.view(torch.int8) if mask is not None and mask.dtype == torch.bool else mask
    decoding.score_keys[grid](
        query, key, scores, partial, *weights, mask, *query.stride(), *key.stride(), *strides, *mask_strides,
        call.scale, B, T, *keys, lower, upper,
        *heads, D, *_ranks(pre), *tile, BD, num_warps=warps, num_stages=3,
        maxnreg=255 if warps == 4 or weights[0] is not None else None,  # else the assembler may take 128, and spill
    )  # fmt: skip
    statistics = query.new_empty(B, N, T, 2, dtype=torch.float32)
    outs = query.new_empty(splits, B, N, T, E, dtype=torch.float32)
    weights, strides = _weights(post)
    BL = max(1, min(64, 4096 // (tile.NP * tile.BT), triton.next_power_of_2(splits)))
    decoding.weigh_values[grid](
        scores, partial, statistics, query.new_empty(scores.shape), value, outs, *weights,
        *value.stride(), *strides, B, T, *keys,
        *heads, E, *_ranks(post), *tile, BE, BL, num_warps=warps, num_stages=3,
    )  # fmt: skip
    out = query.new_empty(B, N, T, E)
    decoding.add_splits[(triton.cdiv(out.numel(), 128),)](outs, out, out.numel(), splits, 8, 128, num_warps=4)
    return out, statistics
