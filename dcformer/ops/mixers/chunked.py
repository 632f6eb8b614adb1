"""The `chunked` backend's mixing in plain PyTorch: any device, any dtype, every feature.

B batch, C queries of the block, S keys, N heads = G groups of n, R rank. The query-wise and static parts are one matrix
a query, [n, n], so that mixing is a batched product along the keys; the key-wise part is R broadcast products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.driver import Block, BlockGrads, BlockMixer
from dcformer.ops.mixers import Call


def _split(weights: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, L, 2R+1, N] to w1, w2 [B, G, L, R, n] and the gate [B, G, L, n]."""
    weights = weights.unflatten(3, (groups, -1)).permute(0, 3, 1, 2, 4)
    rank = weights.shape[3] // 2
    return weights[..., :rank, :], weights[..., rank : 2 * rank, :], weights[..., 2 * rank, :]


def _query_matrix(x: Tensor, composition: Composition) -> Tensor:
    """Everything but the key-wise part as one matrix a query, its rows the heads mixed into: [B, G, C, n, n]."""
    B, _, n, C, _ = x.shape
    matrix = torch.eye(n, dtype=x.dtype, device=x.device)
    if composition.base is not None:
        matrix = (matrix + composition.base).transpose(1, 2)[:, None]
    if composition.query is not None:
        w1, w2, gate = _split(composition.query, composition.groups)
        matrix = matrix + w2.transpose(3, 4) @ w1 + torch.diag_embed(gate)
    return matrix.expand(B, composition.groups, C, n, n)


def _key_rows(composition: Composition) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """w1 and w2 a rank, and the gate, each [B, G, n, 1, S]."""
    assert composition.key is not None
    w1, w2, gate = _split(composition.key, composition.groups)
    w1, w2 = (w.movedim(2, -1).unsqueeze(-2).contiguous() for w in (w1, w2))  # [B, G, R, n, 1, S]
    return w1.unbind(2), w2.unbind(2), gate.transpose(2, 3).unsqueeze(3).contiguous()


def compose(x: Tensor, composition: Composition | None) -> Tensor:
    """y = Compose(x) for [B, N, C, S], into new memory (x itself where there is nothing to mix)."""
    if composition is None:
        return x
    x = x.unflatten(1, (composition.groups, -1))
    if composition.base is None and composition.query is None:
        y = x.clone()
    else:
        y = (_query_matrix(x, composition) @ x.transpose(2, 3)).transpose(2, 3)
    if composition.key is not None:
        w1, w2, gate = _key_rows(composition)
        y.addcmul_(x, gate)
        for r in range(len(w1)):
            y.addcmul_((x * w1[r]).sum(2, keepdim=True), w2[r])
    return y.flatten(1, 2)


def compose_backward(x: Tensor, dy: Tensor, composition: Composition | None, grads: Composition | None) -> Tensor:
    """dx for y = Compose(x), both [B, N, C, S]; adds the gradients of the composition to `grads`."""
    if composition is None or grads is None:
        return dy
    x, dy = (t.unflatten(1, (composition.groups, -1)) for t in (x, dy))
    if composition.base is None and composition.query is None:
        dx = dy.clone()
    else:
        x_rows, dy_rows = x.transpose(2, 3), dy.transpose(2, 3)  # [B, G, C, n, S]
        dx = (_query_matrix(x, composition).transpose(3, 4) @ dy_rows).transpose(2, 3)
        dmatrix = x_rows @ dy_rows.transpose(3, 4)  # [B, G, C, n mixed from, n mixed into]
        if grads.base is not None:
            grads.base.add_(dmatrix.sum((0, 2)))
        if composition.query is not None and grads.query is not None:
            w1, w2, _ = _split(composition.query, composition.groups)
            dw1, dw2, dgate = _split(grads.query, composition.groups)
            dw1.add_(w2 @ dmatrix.transpose(3, 4))
            dw2.add_(w1 @ dmatrix)
            dgate.add_(dmatrix.diagonal(dim1=3, dim2=4))
    if composition.key is not None and grads.key is not None:
        w1s, w2s, gate = _key_rows(composition)
        dw1, dw2, dgate = _split(grads.key, composition.groups)
        dx.addcmul_(dy, gate)
        dgate.add_((x * dy).sum(3).transpose(2, 3))
        for r, (w1, w2) in enumerate(zip(w1s, w2s, strict=True)):
            hidden, dhidden = (x * w1).sum(2, keepdim=True), (dy * w2).sum(2, keepdim=True)  # [B, G, 1, C, S]
            dx.addcmul_(dhidden, w1)
            dw1[..., r, :].add_((dhidden * x).sum(3).transpose(2, 3))
            dw2[..., r, :].add_((hidden * dy).sum(3).transpose(2, 3))
    return dx.flatten(1, 2)


def _visible(block: Block, scores: Tensor) -> Tensor | None:
    """The keys that `block.lower` and `block.upper` leave to each query, [C, S]; `None` if they leave all."""
    (C, S), lower, upper = scores.shape[2:], block.lower, block.upper
    if (upper is None or upper >= S) and (lower is None or lower + C - 1 <= 0):
        return None
    offset = torch.arange(S, device=scores.device) - torch.arange(C, device=scores.device)[:, None]
    visible = torch.ones_like(offset, dtype=torch.bool) if lower is None else offset >= lower
    return visible if upper is None else visible & (offset < upper)


def _masked(scores: Tensor, block: Block) -> Tensor:
    """Compose_pre(scores) with what is not visible at -inf."""
    a = compose(scores, block.pre)
    visible = _visible(block, scores)
    if visible is not None:
        a = a.masked_fill_(~visible, -math.inf)
    if block.mask is None:
        return a
    return a.masked_fill_(~block.mask, -math.inf) if block.mask.dtype == torch.bool else a.add_(block.mask)


class ChunkedMixer(BlockMixer):
    """See `BlockMixer`."""

    name = "chunked"
    priority = 0

    def refuses(self, call: Call) -> str | None:
        """It refuses nothing."""
        return None

    def mix_forward(self, scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `BlockMixer.mix_forward`."""
        a = _masked(scores, block)
        largest = a.amax(-1, keepdim=True)
        largest.masked_fill_(largest == -math.inf, 0)
        p = a.sub_(largest).exp_()
        total = p.sum(-1, keepdim=True)
        total.masked_fill_(total == 0, 1)
        return compose(p.div_(total), block.post), torch.cat([largest, total], -1)

    def mix_backward(
        self, scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
    ) -> tuple[Tensor, Tensor]:
        """See `BlockMixer.mix_backward`."""
        a = _masked(scores if block.pre is not None else scores.clone(), block)
        largest, total = statistics.split(1, dim=-1)
        p = a.sub_(largest).exp_().div_(total)
        weights = compose(p, block.post)
        dp = compose_backward(p, dweights, block.post, grads.post)
        da = p * (dp - (p * dp).sum(-1, keepdim=True))
        if grads.mask is not None:
            grads.mask.add_(da.sum_to_size(grads.mask.shape))
        return weights, compose_backward(scores, da, block.pre, grads.pre)
