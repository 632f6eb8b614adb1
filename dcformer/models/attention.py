"""Composed attention as Hugging Face models call it: its functions, and how a cache holds key-wise weights.

B batch, T queries, S keys, N heads, K key/value heads, H = N/K, D head dim, R rank, W window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from dcformer.ops import Composition, composed_attention, composed_weights
from dcformer.ops.mixers import MIXERS

_IDENTITY = Composition()


class AttentionInputs(NamedTuple):
    """What the attention of a layer works on.

    Attributes:
        query: [B, N, T, D].
        key: [B, K, S, D].
        pre: mixing of the scores.
        post: mixing of the weights.
        scale: factor of the scores.
        visible: `attn_mask`, `is_causal` and `window` as `composed_attention` takes them; those left out have its defaults.
    """

    query: Tensor
    key: Tensor
    pre: Composition
    post: Composition
    scale: float | None
    visible: dict[str, Any]


def packed_width(config: Any) -> int:
    """Channels that a cache holds for a key, and as many for its value: D, and 2R+1 key-wise weights for each of H heads.

    Where only scores or only weights are mixed key-wise, the other side is padded: caches want one width.
    """
    c = config.compose
    rows = 2 * c["rank"] + 1 if c and c["key_wise"] and (c["pre"] or c["post"]) and (c["rank"] or c["gates"]) else 0
    return config.head_dim + rows * config.num_attention_heads // config.num_key_value_heads


def pack(states: Tensor, composition: Composition, width: int | None = None) -> Tensor:
    """Keys or values [B, K, S, D] with the key-wise weights behind them: what a cache stores.

    Where there are none the states are padded to `width`, if one is given.
    """
    if composition.key is None:
        return states if width is None else F.pad(states, (0, width - states.shape[3]))
    weights = composition.key.unflatten(3, (states.shape[1], -1))  # [B, S, 2R+1, K, H]
    return torch.cat([states, weights.permute(0, 3, 1, 2, 4).flatten(3)], dim=3)


def unpack(packed: Tensor, composition: Composition, head_dim: int) -> tuple[Tensor, Composition]:
    """Keys or values and their composition over all S cached positions.

    Args:
        packed: [B, K, S, width], what the cache gave back for `pack(states, composition, width)`.
        composition: that of the new positions.
        head_dim: D.

    Returns:
        Views of `packed`; only where heads share keys (H > 1) the weights are copied.
    """
    states = packed[..., :head_dim]
    if composition.key is None:
        return states, composition
    weights = packed[..., head_dim:].unflatten(3, (composition.key.shape[2], -1))  # [B, K, S, 2R+1, H]
    return states, composition._replace(key=weights.permute(0, 2, 3, 1, 4).flatten(3))


def composed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pre: Composition = _IDENTITY,
    post: Composition = _IDENTITY,
    scaling: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`dcformer.composed_attention` as transformers calls attention.

    Args:
        module: the attention layer; its `is_causal` counts where there is no mask.
        query: [B, N, T, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: bool (True = visible) or float (added), broadcasts to [B, N, T, S], or `None`.
        pre: mixing of the scores; none by default.
        post: mixing of the weights; none by default.
        scaling: factor of the scores.
        dropout: dropout probability.
        backend: as in `dcformer.composed_attention`.
        kwargs: `aligned` and `sliding_window`, see `_visible`; others are ignored.

    Returns:
        ([B, T, N, D], None)

    Raises:
        ValueError: the layer wants something besides attention that would be left out.
    """
    S, visible = _visible(module, query.shape[2], key.shape[2], attention_mask, **kwargs)
    key, value, pre, post = _first(S, key, value, pre, post)
    out = composed_attention(query, key, value, pre, post, scale=scaling, dropout_p=dropout, backend=backend, **visible)
    return out.transpose(1, 2).contiguous(), None


def eager_composed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pre: Composition = _IDENTITY,
    post: Composition = _IDENTITY,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    record: Callable[[AttentionInputs], None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The specification, which returns the composed weights [B, N, T, S] too, and tells `record` what it works on.

    It also has `softcap` and, as `s_aux`, `sinks` of `dcformer.ops.reference.composed_weights`.
    """
    S, visible = _visible(module, query.shape[2], key.shape[2], attention_mask, **kwargs)
    key, value, pre, post = _first(S, key, value, pre, post)
    if record is not None:
        record(AttentionInputs(query, key, pre, post, scaling, visible))
    weights = composed_weights(query, key, pre, post, scale=scaling, softcap=softcap, sinks=s_aux, **visible).to(value.dtype)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2).contiguous(), weights


# Each backend under a name of its own, which any model of transformers may be given; without mixing it is plain attention.
BACKENDS = {f"dc_{name}": partial(composed_attention_forward, backend=name) for name in ("auto", "reference", *MIXERS)}
for _name, _function in BACKENDS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)  # without one, padding would be ignored in silence

# In our models transformers' own names mean composed attention.
COMPOSED_ATTENTION_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "sdpa": composed_attention_forward,
    "eager": eager_composed_attention,
    "paged|eager": eager_composed_attention,
    **BACKENDS,
}


def _visible(
    module: nn.Module,
    T: int,
    S: int,
    attention_mask: Tensor | None,
    aligned: bool = False,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[int, dict[str, Any]]:
    """How many of the keys take part, and the arguments of `composed_attention` that say what each query sees.

    Args:
        module: the attention layer.
        T: number of queries.
        S: number of keys.
        attention_mask: as in `composed_attention_forward`.
        aligned: whether the queries are the last T of the S positions. Then causality and window need no mask, and
            `attention_mask` says what is hidden besides; it may reach further back than a cache does.
        sliding_window: W of a local layer.
        is_causal: whether causality goes without saying where there is no mask; the layer's `is_causal` by default.
        kwargs: anything else; what would change the weights is refused.
    """
    unknown = [name for name in ("softcap", "position_bias", "s_aux") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: composed attention does not have it; choose attn_implementation='eager'")
    if aligned:
        mask = None if attention_mask is None else attention_mask[..., -S:]
        return S, {"attn_mask": mask, "is_causal": True, "window": sliding_window}
    if attention_mask is not None:
        return S, {"attn_mask": attention_mask}
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return S, {}
    # Without a mask transformers means: a single query sees every key, several queries are the first T of the positions.
    return (S if T == 1 else T), {"is_causal": True, "window": sliding_window}


def _first(
    S: int, key: Tensor, value: Tensor, pre: Composition, post: Composition
) -> tuple[Tensor, Tensor, Composition, Composition]:
    """The first S positions of everything that belongs to keys."""
    pre, post = (c if c.key is None else c._replace(key=c.key[:, :S]) for c in (pre, post))
    return key[:, :, :S], value[:, :, :S], pre, post
