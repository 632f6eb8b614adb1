"""Composed attention as Hugging Face models call it: its functions, its masks, and how a cache holds key-wise weights.

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
    """The inverse of `pack` for all S cached positions. Views, but for the weights where heads share keys (H > 1)."""
    if composition.key is None:
        return packed, composition
    weights = packed[..., head_dim:].unflatten(3, (composition.key.shape[2], -1))  # [B, K, S, 2R+1, H]
    return packed[..., :head_dim], composition._replace(key=weights.permute(0, 2, 3, 1, 4).flatten(3))


def _arguments(
    key: Tensor, query: Tensor, attention_mask: Tensor | None, aligned: bool, window: int | None
) -> tuple[int, dict[str, Any]]:
    """How many keys take part, and `composed_attention`'s arguments for what each query sees."""
    T, S = query.shape[2], key.shape[2]
    if aligned:
        mask = None if attention_mask is None else attention_mask[..., -S:]
        return S, {"attn_mask": mask, "is_causal": True, "window": window}
    if attention_mask is not None:
        return S, {"attn_mask": attention_mask}
    # Without a mask transformers means: a single query sees all keys, several queries are the FIRST of the keys.
    return (S if T == 1 else T), {"is_causal": True, "window": window}


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
    aligned: bool = False,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`dcformer.composed_attention` behind transformers' name "sdpa".

    Args:
        module: the attention layer (unused).
        query: [B, N, T, D].
        key, value: [B, K, S, D].
        attention_mask: bool or float, broadcasts to [B, N, T, S], or `None`.
        pre, post: compositions.
        scaling: factor of the scores.
        dropout: dropout probability.
        aligned: whether the queries are the last T of the S positions, so that causality and window need no mask and
            `attention_mask` says only what is hidden besides.
        sliding_window: W of a local layer.

    Returns:
        ([B, T, N, D], None)
    """
    S, seen = _arguments(key, query, attention_mask, aligned, sliding_window)
    pre, post = (c._replace(key=None if c.key is None else c.key[:, :S]) for c in (pre, post))
    out = composed_attention(query, key[:, :, :S], value[:, :, :S], pre, post, scale=scaling, dropout_p=dropout, **seen)
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
    aligned: bool = False,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The readable specification behind transformers' name "eager"; it also returns the composed weights [B, N, T, S]."""
    S, seen = _arguments(key, query, attention_mask, aligned, sliding_window)
    pre, post = (c._replace(key=None if c.key is None else c.key[:, :S]) for c in (pre, post))
    weights = composed_weights(query, key[:, :, :S], pre, post, scale=scaling, **seen)
    value = value[:, :, :S].repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (F.dropout(weights, dropout).to(value.dtype) @ value).transpose(1, 2).contiguous(), weights


COMPOSED_ATTENTION_FUNCTIONS = {"sdpa": sdpa_composed_attention, "eager": eager_composed_attention}
