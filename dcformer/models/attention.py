"""Composed attention as Hugging Face models call it: its functions, and how a cache holds key-wise weights.

B batch, T queries, S keys, N heads, K key/value heads, H = N/K, D head dim, R rank, W window.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcformer.ops import Composition, composed_attention, composed_weights


def pack(states: Tensor, composition: Composition) -> Tensor:
    """Keys or values [B, K, S, D] with the key-wise weights behind them, [B, K, S, D + (2R+1) H]: what a cache stores."""
    if composition.key is None:
        return states
    weights = composition.key.unflatten(3, (states.shape[1], -1))  # [B, S, 2R+1, K, H]
    return torch.cat([states, weights.permute(0, 3, 1, 2, 4).flatten(3)], dim=3)


def unpack(packed: Tensor, composition: Composition, head_dim: int) -> tuple[Tensor, Composition]:
    """Keys or values and their composition over all S cached positions.

    Args:
        packed: [B, K, S, D + (2R+1) H], what the cache gave back for `pack(states, composition)`.
        composition: that of the new positions.
        head_dim: D.

    Returns:
        Views of `packed`; only where heads share keys (H > 1) the weights are copied.
    """
    if composition.key is None:
        return packed, composition
    weights = packed[..., head_dim:].unflatten(3, (composition.key.shape[2], -1))  # [B, K, S, 2R+1, H]
    return packed[..., :head_dim], composition._replace(key=weights.permute(0, 2, 3, 1, 4).flatten(3))


def sdpa_composed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pre: Composition,
    post: Composition,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`dcformer.composed_attention` behind transformers' name "sdpa".

    Args:
        module: the attention layer; part of transformers' contract, not used.
        query: [B, N, T, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: bool (True = visible) or float (added), broadcasts to [B, N, T, S], or `None`.
        pre: mixing of the scores.
        post: mixing of the weights.
        scaling: factor of the scores.
        dropout: dropout probability.
        kwargs: `aligned` and `sliding_window`, see `_visible`; others are ignored.

    Returns:
        ([B, T, N, D], None)
    """
    S, visible = _visible(query.shape[2], key.shape[2], attention_mask, **kwargs)
    key, value, pre, post = _first(S, key, value, pre, post)
    out = composed_attention(query, key, value, pre, post, scale=scaling, dropout_p=dropout, **visible)
    return out.transpose(1, 2).contiguous(), None


def eager_composed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pre: Composition,
    post: Composition,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The specification behind transformers' name "eager"; it returns the composed weights [B, N, T, S] too."""
    S, visible = _visible(query.shape[2], key.shape[2], attention_mask, **kwargs)
    key, value, pre, post = _first(S, key, value, pre, post)
    weights = composed_weights(query, key, pre, post, scale=scaling, **visible).to(value.dtype)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous(), weights


COMPOSED_ATTENTION_FUNCTIONS = {"sdpa": sdpa_composed_attention, "eager": eager_composed_attention}


def _visible(
    T: int, S: int, attention_mask: Tensor | None, aligned: bool = False, sliding_window: int | None = None, **_: Any
) -> tuple[int, dict[str, Any]]:
    """How many of the keys take part, and the arguments of `composed_attention` that say what each query sees.

    Args:
        T: number of queries.
        S: number of keys.
        attention_mask: as in `sdpa_composed_attention`.
        aligned: whether the queries are the last T of the S positions. Then causality and window need no mask, and
            `attention_mask` says what is hidden besides; it may reach further back than a cache does.
        sliding_window: W of a local layer.
    """
    if aligned:
        mask = None if attention_mask is None else attention_mask[..., -S:]
        return S, {"attn_mask": mask, "is_causal": True, "window": sliding_window}
    if attention_mask is not None:
        return S, {"attn_mask": attention_mask}
    # Without a mask transformers means: a single query sees every key, several queries are the first T of the positions.
    return (S if T == 1 else T), {"is_causal": True, "window": sliding_window}


def _first(
    S: int, key: Tensor, value: Tensor, pre: Composition, post: Composition
) -> tuple[Tensor, Tensor, Composition, Composition]:
    """The first S positions of everything that belongs to keys."""
    pre, post = (c if c.key is None else c._replace(key=c.key[:, :S]) for c in (pre, post))
    return key[:, :, :S], value[:, :, :S], pre, post
