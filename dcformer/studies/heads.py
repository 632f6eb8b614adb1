"""What the heads of a model do on a text, layer by layer: their attention with and without mixing, and the mixing itself.

B batch, T queries, S = T keys, L one of the two, N heads (n mixed from, m mixed into), R rank, G groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcformer.models.attention import AttentionInputs
from dcformer.models.decoder import DecoderForCausalLM
from dcformer.ops import Composition
from dcformer.ops.reference import compose, masked_softmax, scores


class Maps(NamedTuple):
    """The steps of composed attention (`dcformer.ops.reference`), all [B, N, T, S].

    Attributes:
        scores: s, before anything is mixed, of visible and hidden keys.
        composed_scores: Compose_pre(s), of both too.
        raw: softmax(s + mask), the attention that the heads would have without composition.
        mixed: p = softmax(Compose_pre(s) + mask).
        composed: p' = Compose_post(p).
        visible: which keys each query sees, bool; its first dimensions may be 1.
    """

    scores: Tensor
    composed_scores: Tensor
    raw: Tensor
    mixed: Tensor
    composed: Tensor
    visible: Tensor


class Mixing(NamedTuple):
    """A composition as matrices: at query i and key j head m gets x[m] + sum_n x[n] (base + query[i] + key[j])[n, m].

    Attributes:
        base: [N, N]; the same everywhere.
        query: [B, T, N, N], gates on the diagonal.
        key: [B, S, N, N], gates on the diagonal.
    """

    base: Tensor
    query: Tensor
    key: Tensor


def check_has_heads(model: Any) -> None:
    """Whether this package knows what happens inside the model's attention.

    Raises:
        ValueError: it is no DCFormer or DCPythia, plain ones (`compose=None`) included.
    """
    if not isinstance(model, DecoderForCausalLM):
        raise ValueError(
            f"the checkpoint is a {type(model).__name__}; only the heads of DCFormer and DCPythia, also plain ones "
            "(compose=None), can be looked into"
        )


@torch.inference_mode()
def attention_inputs(model: DecoderForCausalLM, ids: Tensor) -> list[AttentionInputs]:
    """Runs a model over tokens [B, T]. What attention works on in each layer, in float32.

    Raises:
        ValueError: a token is none of the model's vocabulary.
    """
    if ids.max() >= model.config.vocab_size:
        raise ValueError(f"token {ids.max()} is not in the model's vocabulary of {model.config.vocab_size}")
    seen: list[AttentionInputs] = []
    model.model(ids, use_cache=False, output_attentions=True, record=seen.append)
    return [
        inputs._replace(
            query=inputs.query.float(),
            key=inputs.key.float(),
            pre=inputs.pre.map(Tensor.float),
            post=inputs.post.map(Tensor.float),
        )
        for inputs in seen
    ]


@torch.inference_mode()
def maps(inputs: AttentionInputs) -> Maps:
    """The steps of a layer's attention, by the specification."""
    s = scores(inputs.query, inputs.key, inputs.scale)
    a = compose(s, inputs.pre)
    p = masked_softmax(a, **inputs.visible)
    visible = masked_softmax(torch.zeros_like(s[:, :1]), **inputs.visible) > 0
    return Maps(s, a, masked_softmax(s, **inputs.visible), p, compose(p, inputs.post), visible)


@torch.inference_mode()
def mixing(composition: Composition, batch: int, length: int, heads: int) -> Mixing:
    """A composition of `length` tokens as matrices; zeros for parts that are not there."""
    base = torch.zeros(heads, heads) if composition.base is None else torch.block_diag(*composition.base)
    query, key = (
        base.new_zeros(batch, length, heads, heads) if weights is None else _matrices(weights, composition.groups)
        for weights in (composition.query, composition.key)
    )
    return Mixing(base, query, key)


def _matrices(weights: Tensor, groups: int) -> Tensor:
    """Mixing weights [B, L, 2R+1, N] to matrices [B, L, N, N]."""
    rank = weights.shape[2] // 2
    w1, w2, gate = weights.unflatten(3, (groups, -1)).split((rank, rank, 1), dim=2)  # [B, L, R or 1, G, N/G]
    blocks = torch.einsum("blrgn,blrgm->blgnm", w1, w2) + torch.diag_embed(gate.squeeze(2))
    apart = torch.eye(groups, dtype=weights.dtype, device=weights.device)
    return torch.einsum("blgnm,gh->blgnhm", blocks, apart).flatten(4, 5).flatten(2, 3)
