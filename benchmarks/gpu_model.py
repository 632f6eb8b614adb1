"""A decoder in plain PyTorch, with composed heads or without, for benchmarks: a machine with a GPU may lack transformers.

It is what `DCFormerForCausalLM` computes (RMSNorm, rotary embeddings, SwiGLU, local and global layers in turns). Without
composition local layers attend globally with FlashAttention: `scaled_dot_product_attention` has no window that is faster.

B batch, T queries, S keys, E hidden size, N heads, D head dim, W window, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcformer import Compose, Composition, composed_attention


@dataclass(frozen=True)
class Shape:
    """By default the paper's 1.4B: 24 layers, E=2048, 32 heads."""

    layers: int = 24
    E: int = 2048
    N: int = 32
    mlp: int = 5504
    V: int = 50304
    window: int = 256


class Cache:
    """Keys and values of S positions, [1, N, S, D], and their mixing weights [1, S, 2R+1, N] with composition; all random."""

    def __init__(self, shape: Shape, S: int, rows: int, like: Tensor):
        def draw(*sizes: int) -> Tensor:
            return torch.randn(*sizes, dtype=like.dtype, device=like.device)

        self.key, self.value = (draw(1, shape.N, S, shape.E // shape.N) for _ in range(2))
        self.pre, self.post = (0.1 * draw(1, S, rows, shape.N) for _ in range(2))


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding of [B, N, T, D]; `rotation` has cosines and sines, [2, T, D/2]."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    """Attention and MLP, each with a norm before and a residual around. `backend` is that of composition, `None` for none."""

    def __init__(self, shape: Shape, window: int | None, backend: str | None):
        super().__init__()
        E = shape.E
        self.N, self.window, self.backend = shape.N, window, backend
        self.attention_norm, self.mlp_norm = nn.RMSNorm(E), nn.RMSNorm(E)
        self.qkv, self.out = nn.Linear(E, 3 * E, bias=False), nn.Linear(E, E, bias=False)
        self.up, self.down = nn.Linear(E, 2 * shape.mlp, bias=False), nn.Linear(shape.mlp, E, bias=False)
        self.compose = None if backend is None else Compose(E, shape.N)

    def forward(self, hidden: Tensor, rotation: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, E] to [B, T, E]; with a cache the token is its last position."""
        x = self.attention_norm(hidden)
        hidden = hidden + self.out(self.attend(x, rotation, cache).transpose(1, 2).flatten(2))
        gate, up = self.up(self.mlp_norm(hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)

    def attend(self, x: Tensor, rotation: Tensor, cache: Cache | None) -> Tensor:
        """[B, T, E] to [B, N, T, D]."""
        query, key, value = (h.transpose(1, 2) for h in self.qkv(x).unflatten(2, (3, self.N, -1)).unbind(2))
        query, key = turned(query, rotation), turned(key, rotation)
        pre, post = (None, None) if self.compose is None else self.compose(x)
        if cache is not None:
            seen = slice(None if self.window is None else -self.window, None)
            key, value = (_kept(held, new, 2)[:, :, seen] for held, new in ((cache.key, key), (cache.value, value)))
            pre, post = _with_keys(pre, cache.pre, seen), _with_keys(post, cache.post, seen)
        if self.backend is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        return composed_attention(query, key, value, pre, post, is_causal=True, window=self.window, backend=self.backend)


def _kept(held: Tensor, new: Tensor, dim: int) -> Tensor:
    held.narrow(dim, held.shape[dim] - 1, 1).copy_(new)
    return held


def _with_keys(composition: Composition | None, held: Tensor, seen: slice) -> Composition | None:
    if composition is None:
        return None
    return composition._replace(key=_kept(held, composition.key, 1)[:, seen])


class Model(nn.Module):
    """A language model of local and global layers in turns (LG)."""

    def __init__(self, shape: Shape, backend: str | None):
        super().__init__()
        self.shape = shape
        self.embed, self.norm = nn.Embedding(shape.V, shape.E), nn.RMSNorm(shape.E)
        self.layers = nn.ModuleList(
            Layer(shape, None if i % 2 else shape.window, backend) for i in range(shape.layers)
        )  # fmt: skip
        self.head = nn.Linear(shape.E, shape.V, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each of [B, T] from those before."""
        rotation = self._rotation(0, ids.shape[1])
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return F.cross_entropy(self.head(self.norm(hidden))[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def caches(self, S: int) -> list[Cache]:
        """One a layer."""
        composed = self.layers[0].compose
        rows = 0 if composed is None else 2 * composed.rank + 1
        return [Cache(self.shape, S, rows, self.embed.weight) for _ in self.layers]

    @torch.no_grad()
    def decode(self, ids: Tensor, caches: list[Cache]) -> Tensor:
        """The likeliest next token after a token [1, 1], the last position of the caches."""
        S = caches[0].key.shape[2]
        rotation = self._rotation(S - 1, S)
        hidden = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, rotation, cache)
        return self.head(self.norm(hidden)).argmax(-1)

    def _rotation(self, start: int, stop: int) -> Tensor:
        D, device = self.shape.E // self.shape.N, self.embed.weight.device
        rate = 10000.0 ** -(torch.arange(0, D, 2, device=device) / D)
        angles = torch.arange(start, stop, device=device)[:, None] * rate
        return torch.stack([angles.cos(), angles.sin()])
