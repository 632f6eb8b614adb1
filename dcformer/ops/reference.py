"""The specification: composed attention as its equations read, in any dtype, with all T x S weights in memory.

B batch, T queries, S keys, N heads (n mixed from, m mixed into), K key/value heads, D head dim, R rank, G groups.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dcformer.ops.composition import Composition


def compose(x: Tensor, composition: Composition | None) -> Tensor:
    """Mixes heads: y = Compose(x), the equation of `Composition`. x and y are [B, N, T, S]."""
    if composition is None:
        return x
    x = x.unflatten(1, (composition.groups, -1))  # [B, G, n, T, S]
    y = x
    if composition.base is not None:
        y = y + torch.einsum("bgnts,gnm->bgmts", x, composition.base)
    for weights, letter in ((composition.query, "t"), (composition.key, "s")):
        if weights is None:
            continue
        rank = weights.shape[2] // 2
        weights = weights.unflatten(3, (composition.groups, -1))  # [B, T or S, 2R+1, G, n]
        w1, w2, gate = weights.split((rank, rank, 1), dim=2)
        hidden = torch.einsum(f"bgnts,b{letter}rgn->bgrts", x, w1)
        y = y + torch.einsum(f"bgrts,b{letter}rgm->bgmts", hidden, w2)
        y = y + torch.einsum(f"bgmts,b{letter}gm->bgmts", x, gate.squeeze(2))
    return y.flatten(1, 2)


def visible_keys(T: int, S: int, is_causal: bool, window: int | None, device: torch.device | None = None) -> Tensor:
    """Which keys each query may see, [T, S]: the queries are the last T of the S positions."""
    distance = torch.arange(S - T, S, device=device)[:, None] - torch.arange(S, device=device)  # [T, S]
    visible = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    return visible


def scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """The scores before anything is mixed, scale * q k^T, [B, N, T, S]."""
    scale = query.shape[3] ** -0.5 if scale is None else scale
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return scale * query @ key.transpose(2, 3)


def masked_softmax(
    a: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax_S(a + mask), [B, N, T, S]; zeros where a query sees no key. Arguments as in `composed_weights`."""
    a = a.masked_fill(~visible_keys(a.shape[2], a.shape[3], is_causal, window, a.device), -math.inf)
    if attn_mask is not None:
        a = a.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else a + attn_mask
    empty = (a == -math.inf).all(-1, keepdim=True)
    a = a.masked_fill(empty, 0)
    if sinks is None:
        p = a.softmax(-1)
    else:
        p = torch.cat([a, sinks[:, None, None].to(a.dtype).expand(*a.shape[:3], 1)], dim=-1).softmax(-1)[..., :-1]
    return p.masked_fill(empty, 0)


def composed_weights(
    query: Tensor,
    key: Tensor,
    pre: Composition | None = None,
    post: Composition | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The composed attention weights p' = Compose_post(softmax(Compose_pre(s) + mask)), [B, N, T, S].

    Arguments as in `dcformer.composed_attention`, and two that some models have. Memory is quadratic in the length.

    Args:
        softcap: c of c tanh(a / c), which bounds the composed scores before the mask.
        sinks: [N], logits of a key without a value that every query sees: it takes its share of the softmax.
    """
    a = compose(scores(query, key, scale), pre)
    if softcap is not None:
        a = softcap * torch.tanh(a / softcap)
    p = masked_softmax(a, attn_mask, is_causal, window, sinks)
    return compose(p, post)


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None = None,
    post: Composition | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """o = p' v. Arguments as in `dcformer.composed_attention`."""
    weights = composed_weights(query, key, pre, post, attn_mask=attn_mask, is_causal=is_causal, window=window, scale=scale)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return F.dropout(weights, dropout_p) @ value
