"""The public operator: checks what it is given, chooses a backend, calls it.

B batch, T queries, S keys, N heads, K key/value heads, D head dim, R rank, G groups, W window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dcformer.ops import reference
from dcformer.ops.autograd import composed_attention_op
from dcformer.ops.composition import Composition
from dcformer.ops.mixers import MIXERS, Call, Mixer, register_mixer, within_documents
from dcformer.ops.mixers.chunked import ChunkedMixer
from dcformer.ops.mixers.cpu import CpuMixer
from dcformer.ops.mixers.triton import TritonMixer

register_mixer(ChunkedMixer())
register_mixer(CpuMixer())
register_mixer(TritonMixer())


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: the backend that `auto` takes, and for every backend why it is or is not taken."""

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"auto takes {self.backend!r}"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.reasons.items()])


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None = None,
    post: Composition | None = None,
    *,
    attn_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention whose heads are composed before and after the softmax (DCMHA, arXiv 2405.08553, Section 3).

        s = scale q k^T;  a = Compose_pre(s) + mask;  p = softmax(a);  o = Compose_post(p) v

    It takes what `torch.nn.functional.scaled_dot_product_attention` takes, and without `pre` and `post` gives what it gives.
    Heads share keys and values where N is a multiple of K (no `enable_gqa` needed). Under autocast all inputs are cast to its
    dtype. Differentiable once, in reverse mode, in every floating-point input; for second derivatives, forward mode and
    `torch.func` take backend "reference".

    Args:
        query: [B, N, T, D].
        key: [B, K, S, D].
        value: [B, K, S, Dv].
        pre: mixing of the scores, or `None`. Of the dtype and on the device of `query`.
        post: mixing of the weights, or `None`.
        attn_mask: broadcasts to [B, N, T, S]; bool (True = visible) or of `query`'s dtype, added after `pre` and before the
            softmax. It may be combined with `is_causal` and `window`; a key must pass all of them.
        document_ids: [B, S] integers, which of the documents packed into a row each position is of: a query sees only keys of
            its own. Negative: padding, which sees and is seen by nothing. The queries' are the last T. Only the backends
            "reference" and "cpu" make a mask of all T S pairs of it.
        is_causal: the queries are the last T of the S positions, so query i stands at position i + S - T; it sees no later key.
        window: a query sees only keys less than `window` positions away: with `is_causal` the last `window` keys, its own
            included.
        scale: factor of the scores; D ** -0.5 by default.
        dropout_p: share of the final weights set to zero; the rest is divided by 1 - dropout_p.
        backend: "auto", "reference" or a mixer's name (`explain` lists them). A named backend never falls back to another.

    Returns:
        [B, N, T, Dv] in the dtype of `query`. A row that sees no key is zero, and so are its gradients.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value, or `backend` cannot serve the call.
    """
    call = _call(query, key, value, pre, post, attn_mask, document_ids, is_causal, window, scale, dropout_p)
    backend = _choose(call, backend)
    if backend == "reference":
        with torch.autocast(query.device.type, enabled=False):
            mask = call.attn_mask
            if document_ids is not None:
                mask = within_documents(mask, document_ids[:, document_ids.shape[1] - query.shape[2] :], document_ids)
            return reference.composed_attention(
                *call[:5],
                attn_mask=mask, is_causal=is_causal, window=window, scale=call.scale, dropout_p=dropout_p,
            )  # fmt: skip
    pre, post = call.pre or Composition(), call.post or Composition()
    seed = torch.randint(1 << 48, (), device="cpu") if dropout_p > 0 else None
    out, _ = composed_attention_op(
        *call[:3], *pre[:3], *post[:3], call.attn_mask, seed, document_ids,
        pre.groups, post.groups, is_causal, window, call.scale, dropout_p, backend,
    )  # fmt: skip
    return out


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None = None,
    post: Composition | None = None,
    *,
    attn_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    is_causal: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
) -> Explanation:
    """Which backend `composed_attention` would take for these arguments with `backend="auto"`, and why.

    Raises:
        ValueError: as `composed_attention`.
    """
    call = _call(query, key, value, pre, post, attn_mask, document_ids, is_causal, window, None, dropout_p)
    chosen = _choose(call, "auto")
    reasons = {}
    for mixer in _by_priority():
        refusal = mixer.refuses(call)
        ready = "chosen" if mixer.name == chosen else f"could serve, but {chosen!r} is faster"
        reasons[mixer.name] = refusal or ready
    reasons["reference"] = "the specification; taken only when named"
    return Explanation(chosen, reasons)


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    attn_mask: Tensor | None,
    document_ids: Tensor | None,
    is_causal: bool,
    window: int | None,
    scale: float | None,
    dropout_p: float,
) -> Call:
    """The arguments as a backend gets them, but for the seed: in autocast's dtype, without empty compositions, checked."""
    pre, post = (None if c is None or c.is_identity else c for c in (pre, post))
    query, key, value, pre, post, attn_mask = _autocast(query, key, value, pre, post, attn_mask)
    call = Call(query, key, value, pre, post, attn_mask, None, is_causal, window, 1.0, dropout_p, document_ids)
    _validate(call)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    return call._replace(attn_mask=attn_mask, scale=query.shape[3] ** -0.5 if scale is None else float(scale))


def _by_priority() -> list[Mixer]:
    return sorted(MIXERS.values(), key=lambda mixer: -mixer.priority)


def _choose(call: Call, backend: str) -> str:
    if backend == "reference":
        return backend
    if backend == "auto":
        return next(mixer.name for mixer in _by_priority() if mixer.refuses(call) is None)
    if backend not in MIXERS:
        known = ", ".join(repr(name) for name in ("auto", "reference", *MIXERS))
        raise ValueError(f"backend={backend!r} is unknown; choose one of {known}")
    refusal = MIXERS[backend].refuses(call)
    if refusal is not None:
        raise ValueError(f"backend={backend!r} cannot serve this request: {refusal}")
    return backend


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, pre: Composition | None, post: Composition | None, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Composition | None, Composition | None, Tensor | None]:
    """Everything in autocast's dtype where autocast is on, as PyTorch does it for its own attention."""
    device = query.device.type
    if query.dtype == torch.float64 or not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return query, key, value, pre, post, attn_mask
    dtype = torch.get_autocast_dtype(device)

    pre, post = (None if c is None else c.map(lambda part: part.to(dtype)) for c in (pre, post))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.to(dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype), pre, post, attn_mask


def _validate(call: Call) -> None:
    query, key, value = call.query, call.key, call.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [batch, heads, length, head_dim]")
    if not query.is_floating_point():
        raise ValueError(f"query has dtype {query.dtype}; it must be floating point")
    (B, N, T, D), (K, S) = query.shape, key.shape[1:3]
    if key.shape[0] != B or value.shape[0] != B:
        raise ValueError(f"query, key and value have batch sizes {B}, {key.shape[0]}, {value.shape[0]}; they must be equal")
    if key.shape[3] != D or D == 0:
        raise ValueError(f"key has head_dim {key.shape[3]} and query {D}; they must be equal and at least 1")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(f"value has heads and length {tuple(value.shape[1:3])}, key {(K, S)}; they must be equal")
    if N == 0 or K == 0 or N % K != 0:
        raise ValueError(f"query has {N} heads and key {K}; the query heads must be a multiple of the key heads")
    window = call.window
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or not 1 <= window < 1 << 62):
        raise ValueError(f"window={window!r} must be a whole number from 1 (the query itself), or None for no window")
    if not 0 <= call.dropout_p <= 1:
        raise ValueError(f"dropout_p={call.dropout_p} must be between 0 and 1")
    _same_kind("key", key, query)
    _same_kind("value", value, query)
    for name, composition in (("pre", call.pre), ("post", call.post)):
        if composition is not None:
            _validate_composition(name, composition, query, S)
    mask = call.attn_mask
    if mask is not None:
        if mask.dtype != torch.bool:
            _same_kind("attn_mask", mask, query, " or bool")
        elif mask.device != query.device:
            raise ValueError(f"attn_mask is on {mask.device} and query on {query.device}; move them to one device")
        full = (B, N, T, S)
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(mask.shape[::-1], full[::-1], strict=False)):
            raise ValueError(f"attn_mask has shape {tuple(mask.shape)}; it must broadcast to [B, N, T, S] = {list(full)}")
    documents = call.documents
    if documents is not None:
        if documents.shape != (B, S):
            raise ValueError(f"document_ids has shape {tuple(documents.shape)}; it must be [B, S] = {[B, S]}")
        if documents.is_floating_point() or documents.is_complex() or documents.dtype == torch.bool:
            raise ValueError(f"document_ids has dtype {documents.dtype}; it must be integer")
        if documents.device != query.device:
            raise ValueError(f"document_ids is on {documents.device} and query on {query.device}; move them to one device")
        if T > S:
            raise ValueError(
                f"document_ids names {S} positions, and the {T} queries are the last of them; give no more queries than keys"
            )


def _validate_composition(name: str, composition: Composition, query: Tensor, S: int) -> None:
    B, N, T, _ = query.shape
    G = composition.groups
    if G < 1 or N % G != 0:
        raise ValueError(f"{name}.groups={G} must divide the {N} heads of query")
    n = N // G
    if composition.base is not None:
        if composition.base.shape != (G, n, n):
            raise ValueError(f"{name}.base has shape {tuple(composition.base.shape)}; it must be [G, N/G, N/G] = {[G, n, n]}")
        _same_kind(f"{name}.base", composition.base, query)
    for part, weights, length in (("query", composition.query, T), ("key", composition.key, S)):
        if weights is None:
            continue
        if weights.dim() != 4 or weights.shape[:2] != (B, length) or weights.shape[3] != N or weights.shape[2] % 2 == 0:
            expected = f"[B, {'T' if part == 'query' else 'S'}, 2R+1, N] = [{B}, {length}, 2R+1, {N}]"
            raise ValueError(f"{name}.{part} has shape {tuple(weights.shape)}; it must be {expected}")
        _same_kind(f"{name}.{part}", weights, query)


def _same_kind(name: str, tensor: Tensor, query: Tensor, alternative: str = "") -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device} and query on {query.device}; move them to one device")
    if tensor.dtype != query.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must be {query.dtype} as query{alternative}")
