"""Modules: `Compose` makes the mixing weights from hidden states, `DCMHA` takes the place of `nn.MultiheadAttention`.

B batch, T queries, S keys, N heads = G groups of n, E hidden size, R rank, C channels (pre-query, pre-key, post-query, post-key),
I = 2 R n inner size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcformer.ops import Composition

_RMS_EPS = 1e-6


class _DynamicWeights(nn.Module):
    """Hidden states [B, L, E] to mixing weights of every channel, [B, L, 2R+1, N] each. See `Compose`."""

    def __init__(self, embed_dim: int, channels: int, groups: int, n: int, rank: int, gates: bool, factory: dict[str, Any]):
        super().__init__()
        self.shape = (groups, channels, n, rank)
        inner = 2 * rank * n
        self.dw1 = nn.Parameter(torch.empty(embed_dim, groups, channels, inner, **factory)) if rank else None
        self.qkw = nn.Parameter(torch.empty(groups, channels, inner, 2 * rank, n, **factory)) if rank else None
        self.dd = nn.Parameter(torch.empty(embed_dim, groups, channels * n, **factory)) if gates else None

    def forward(self, hidden: Tensor, first: int = 0, last: int | None = None) -> list[Tensor]:
        """The weights of channels `first` to `last` (exclusive), a tensor each."""
        groups, channels, n, rank = self.shape
        chosen = slice(first, channels if last is None else last)
        count = chosen.stop - chosen.start
        rows = []  # each [B, L, G, c, rows, n]
        if self.dw1 is not None and self.qkw is not None:
            inner = F.gelu((hidden @ self.dw1[:, :, chosen].flatten(1)).unflatten(2, (groups, count, -1)))
            w1, w2 = torch.einsum("blgci,gcirn->blgcrn", inner, self.qkw[:, chosen]).split(rank, dim=4)
            rows += [F.rms_norm(w1, (n,), eps=_RMS_EPS), w2]
        if self.dd is not None:
            dd = self.dd.unflatten(2, (channels, n))[:, :, chosen]
            rows.append(torch.tanh(hidden @ dd.flatten(1)).unflatten(2, (groups, count, 1, n)))
        else:
            rows.append(torch.zeros_like(rows[0][..., :1, :]))
        kind = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
        weights = torch.cat([row.to(kind) for row in rows], dim=4)  # [B, L, G, c, 2R+1, n]
        return [channel.transpose(2, 3).flatten(3) for channel in weights.unbind(3)]

    def reset_parameters(self, gate_std: float) -> None:
        """Draws the parameters as the table of `Compose` says."""
        n, rank = self.shape[2:]
        if self.dw1 is not None and self.qkw is not None:
            embed_dim, inner = self.dw1.shape[0], self.dw1.shape[3]
            nn.init.normal_(self.dw1, std=math.sqrt(2 / (embed_dim + inner)))
            nn.init.normal_(self.qkw, std=0.01 * 2 / (n + rank) * math.sqrt(1 / inner))
        if self.dd is not None:
            nn.init.normal_(self.dd, std=gate_std * math.sqrt(2 / (self.dd.shape[0] + n)))


class Compose(nn.Module):
    """Hidden states to the mixing of scores and of weights (arXiv 2405.08553, Section 3.2).

        [w1, w2] = split(GELU(h dw1) qkw),  w1 = w1 / rms(w1 over its n heads),  gate = tanh(h dd)

    Parameter names are those of the released checkpoints. What an option leaves out has no parameters.

    Initialisation (the paper's training code):

    | parameter | shape | normal with standard deviation |
    |---|---|---|
    | dw1 | [E, G, C, I] | sqrt(2 / (E + I)) |
    | qkw | [G, C, I, 2R, n] | 0.01 * 2 / (n + R) * sqrt(1 / I) |
    | dd | [E, G, C n] | gate_std * sqrt(2 / (E + n)) |
    | pre_base, post_base | [G, n, n] | 0.1 / sqrt(n) |

    Args:
        embed_dim: E, size of the hidden states on the query side.
        num_heads: N.
        rank: R of the dynamic mixing; 0 leaves only gates and the static base.
        groups: G; heads mix only inside their group.
        query_wise: whether the query's hidden state mixes heads.
        key_wise: whether the key's hidden state mixes heads.
        gates: whether each head is also scaled by its own gate.
        static: whether there is a learned mixing that is the same everywhere ("talking heads" when alone).
        pre: whether scores are mixed.
        post: whether weights are mixed.
        key_embed_dim: size of the hidden states on the key side, where it differs (cross-attention).
        gate_std: factor of the gates' initialisation; the authors' later PyTorch code has 0.05.

    Raises:
        ValueError: `groups` does not divide `num_heads`, or a size is not positive.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        rank: int = 2,
        groups: int = 1,
        query_wise: bool = True,
        key_wise: bool = True,
        gates: bool = True,
        static: bool = False,
        pre: bool = True,
        post: bool = True,
        key_embed_dim: int | None = None,
        gate_std: float = 0.005,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if embed_dim < 1 or num_heads < 1:
            raise ValueError(f"embed_dim={embed_dim} and num_heads={num_heads} must be at least 1")
        if groups < 1 or num_heads % groups:
            raise ValueError(f"groups={groups} must divide num_heads={num_heads}")
        if rank < 0:
            raise ValueError(f"rank={rank} must be at least 0")
        self.embed_dim, self.num_heads, self.rank, self.groups, self.gate_std = embed_dim, num_heads, rank, groups, gate_std
        self.key_embed_dim = key_embed_dim if key_embed_dim is not None else embed_dim
        self.query_wise, self.key_wise, self.gates, self.static = query_wise, key_wise, gates, static
        self.pre, self.post = pre, post
        n = num_heads // groups
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.sides = [name for name, on in (("pre", pre), ("post", post)) if on]
        self.parts = [name for name, on in (("query", query_wise), ("key", key_wise)) if on] if rank or gates else []
        self.pre_base = nn.Parameter(torch.empty(groups, n, n, **factory)) if static and pre else None
        self.post_base = nn.Parameter(torch.empty(groups, n, n, **factory)) if static and post else None

        def dynamic(size: int, parts: list[str]) -> _DynamicWeights | None:
            channels = len(self.sides) * len(parts)
            return _DynamicWeights(size, channels, groups, n, rank, gates, factory) if channels else None

        # One module makes all channels, in the order [pre-query, pre-key, post-query, post-key]. Where the key side has hidden
        # states of another size it has a module of its own.
        self.split = self.key_embed_dim != embed_dim
        self.dynamic = dynamic(embed_dim, [p for p in self.parts if p == "query" or not self.split])
        self.dynamic_key = dynamic(self.key_embed_dim, [p for p in self.parts if p == "key"]) if self.split else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as the table above says."""
        for module in (self.dynamic, self.dynamic_key):
            if module is not None:
                module.reset_parameters(self.gate_std)
        for base in (self.pre_base, self.post_base):
            if base is not None:
                nn.init.normal_(base, std=0.1 / math.sqrt(base.shape[-1]))

    @torch.no_grad()
    def reset_to_identity(self) -> None:
        """Draws parameters with which nothing is mixed until they are trained, and all of which learn from the first step.

        The w2 half of `qkw`, `dd` and the static bases are zero; the w1 half is not, since two zero factors would never learn.
        """
        self.reset_parameters()
        for module in (self.dynamic, self.dynamic_key):
            if module is not None and module.qkw is not None:
                module.qkw[..., self.rank :, :] = 0
            if module is not None and module.dd is not None:
                module.dd.zero_()
        for base in (self.pre_base, self.post_base):
            if base is not None:
                base.zero_()

    def forward(self, hidden: Tensor, key_hidden: Tensor | None = None) -> tuple[Composition, Composition]:
        """The mixing of scores and the mixing of weights.

        Args:
            hidden: [B, T, E], what the queries are projected from.
            key_hidden: [B, S, key_embed_dim], what the keys are projected from; `hidden` where not given.

        Returns:
            (pre, post): Compositions for `dcformer.composed_attention`; one that is switched off is the identity.
        """
        weights = self._weights(hidden, key_hidden)
        pre, post = (
            Composition(base, weights.get((side, "query")), weights.get((side, "key")), self.groups)
            for side, base in (("pre", self.pre_base), ("post", self.post_base))
        )
        return pre, post

    def _weights(self, hidden: Tensor, key_hidden: Tensor | None) -> dict[tuple[str, str], Tensor]:
        names = [(side, part) for side in self.sides for part in self.parts]
        if self.dynamic is not None and not self.split and key_hidden is None:
            return dict(zip(names, self.dynamic(hidden), strict=True))
        weights = {}
        for part, states in (("query", hidden), ("key", hidden if key_hidden is None else key_hidden)):
            module = self.dynamic_key if self.split and part == "key" else self.dynamic
            if module is None or part not in self.parts:
                continue
            for i, side in enumerate(self.sides):
                channel = i if self.split else names.index((side, part))
                weights[side, part] = module(states, channel, channel + 1)[0]
        return weights

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, groups={self.groups}"


class DCMHA(nn.Module):
    """Takes the place of `nn.MultiheadAttention`."""
