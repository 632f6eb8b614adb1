"""Launches the decoding kernels: which calls they serve, tiles, splits, strides. No copies, nothing waits for the device.

B batch, T queries, S keys, N heads = G groups of n, K key heads of H query heads, D and E channels of a key and of a value.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import Call
from dcformer.ops.mixers.triton import decoding
from dcformer.ops.mixers.triton.launch import _FAR, _broadcast_strides, _ranks

_MOST_QUERIES = 16
_MOST_SCORES = 4096  # of a tile that composes, for four warps
_MOST_ROWS = 64  # of a product: the queries of all heads that share a key head
_MOST_CHANNELS = 256


def _groups(call: Call) -> int:
    sides = [side for side in (call.pre, call.post) if side is not None]
    return sides[0].groups if sides else call.query.shape[1]


def _tile_of_heads(call: Call) -> tuple[int, int]:
    """NP and BT: heads and queries, padded."""
    has_base = any(side is not None and side.base is not None for side in (call.pre, call.post))
    NP = triton.next_power_of_2(call.query.shape[1] // _groups(call))
    return max(NP, 16 if has_base else 1), triton.next_power_of_2(call.query.shape[2])  # 16: a product on tensor cores


def serves(call: Call) -> bool:
    """Whether the call has so few queries that all of them fit a program, and no dropout."""
    (_, N, T, D), (K, S, E) = call.query.shape, call.value.shape[1:]
    if call.dropout_p > 0 or T == 0 or S == 0 or T > _MOST_QUERIES or max(D, E) > _MOST_CHANNELS or E == 0:
        return False
    NP, BT = _tile_of_heads(call)
    return NP * BT * 16 <= _MOST_SCORES and N // K * T <= _MOST_ROWS


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
    NP, BT = _tile_of_heads(call)
    BD, BE = (max(16, triton.next_power_of_2(size)) for size in (D, E))
    BM = max(16, triton.next_power_of_2(N // K * T))
    G = _groups(call)
    heads = (G, N // G, N // K)

    first, window = S - T, call.window  # the position of the first query
    start = 0 if window is None else max(0, first - window + 1)
    stop = S if window is None or call.is_causal else min(S, S - 1 + window)
    lower = -_FAR if window is None else max(-_FAR, first - window + 1)
    upper = first + 1 if call.is_causal else _FAR if window is None else min(_FAR, first + window)

    wide = query.dtype == torch.float32 or max(BD, BE) > 128
    BS = min(16 if wide else 32, _MOST_SCORES // (NP * BT))
    tiles = triton.cdiv(stop - start, BS)
    length = BS * triton.cdiv(tiles, max(1, _programs(query.device) // (B * G)))
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
        *heads, D, *_ranks(pre), NP, BT, BM, BS, BD, num_warps=4, num_stages=3,
    )  # fmt: skip
    statistics = query.new_empty(B, N, T, 2, dtype=torch.float32)
    outs = query.new_empty(splits, B, N, T, E, dtype=torch.float32)
    weights, strides = _weights(post)
    BL = max(1, min(64, _MOST_SCORES // (NP * BT), triton.next_power_of_2(splits)))
    decoding.weigh_values[grid](
        scores, partial, statistics, torch.empty_like(scores, dtype=query.dtype), value, outs, *weights,
        *value.stride(), *strides, B, T, *keys,
        *heads, E, *_ranks(post), NP, BT, BM, BS, BE, BL, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = query.new_empty(B, N, T, E)
    decoding.add_splits[(triton.cdiv(out.numel(), 128),)](outs, out, out.numel(), splits, 8, 128, num_warps=4)
    return out, statistics
