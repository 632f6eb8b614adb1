"""Modules: `Compose` makes the mixing weights from hidden states, `DCMHA` takes the place of `nn.MultiheadAttention`.

B batch, T queries, S keys, L one of the two, N heads = G groups of n, K key/value heads, D head dim, E hidden size, R rank,
W window, C channels (pre-query, pre-key, post-query, post-key), I = 2 R n inner size.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcformer.ops import Composition, composed_attention, composed_weights
from dcformer.ops.reference import visible_keys

_RMS_EPS = 1e-6


def _check_states(name: str, states: Tensor, size_name: str, size: int) -> None:
    if states.dim() != 3 or states.shape[2] != size:
        raise ValueError(f"{name} has shape {tuple(states.shape)}; it must be [batch, length, {size_name}={size}]")


class _DynamicWeights(nn.Module):
    """Hidden states [B, L, E] to mixing weights of every channel, [B, L, 2R+1, N] each. See `Compose`."""

    def __init__(
        self, embed_dim: int, channels: int, groups: int, n: int, rank: int, gate_std: float | None, factory: dict[str, Any]
    ):
        super().__init__()
        self.shape, self.gate_std = (groups, channels, n, rank), gate_std
        inner = 2 * rank * n
        self.dw1 = nn.Parameter(torch.empty(embed_dim, groups, channels, inner, **factory)) if rank else None
        self.qkw = nn.Parameter(torch.empty(groups, channels, inner, 2 * rank, n, **factory)) if rank else None
        self.dd = nn.Parameter(torch.empty(embed_dim, groups, channels * n, **factory)) if gate_std is not None else None

    def forward(self, hidden: Tensor, chosen: slice) -> list[Tensor]:
        """The weights of the chosen channels, a tensor each."""
        groups, channels, n, rank = self.shape
        count = len(range(channels)[chosen])
        rows = []  # each [B, L, G, c, rows, n]
        if self.dw1 is not None and self.qkw is not None:
            inner = F.gelu((hidden @ self.dw1[:, :, chosen].flatten(1)).unflatten(2, (groups, count, -1)))
            w1, w2 = torch.einsum("blgci,gcirn->blgcrn", inner, self.qkw[:, chosen]).split(rank, dim=4)
            rows += [F.rms_norm(w1, (n,), eps=_RMS_EPS).to(w2.dtype), w2]
        if self.dd is not None:
            dd = self.dd.unflatten(2, (channels, n))[:, :, chosen]
            rows.append(torch.tanh(hidden @ dd.flatten(1)).unflatten(2, (groups, count, 1, n)))
        else:
            rows.append(torch.zeros_like(rows[0][..., :1, :]))
        weights = torch.cat(rows, dim=4)  # [B, L, G, c, 2R+1, n]
        return [channel.transpose(2, 3).flatten(3) for channel in weights.unbind(3)]

    def reset_parameters(self) -> None:
        """Draws the parameters as the table of `Compose` says."""
        n, rank = self.shape[2:]
        if self.dw1 is not None and self.qkw is not None:
            embed_dim, inner = self.dw1.shape[0], self.dw1.shape[3]
            nn.init.normal_(self.dw1, std=math.sqrt(2 / (embed_dim + inner)))
            nn.init.normal_(self.qkw, std=0.01 * 2 / (n + rank) * math.sqrt(1 / inner))
        if self.dd is not None and self.gate_std is not None:
            nn.init.normal_(self.dd, std=self.gate_std * math.sqrt(2 / (self.dd.shape[0] + n)))


class Compose(nn.Module):
    """Hidden states to the mixing of scores and of weights (arXiv 2405.08553, Section 3.2).

        [w1, w2] = split(GELU(h dw1) qkw),  w1 = w1 / rms(w1 over its n heads),  gate = tanh(h dd)

    Parameters have the shapes of the released checkpoints. What an option leaves out has no parameters.

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
        ValueError: `groups` does not divide `num_heads`, a size is not positive, or `rank` is negative.
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
        key_embed_dim = embed_dim if key_embed_dim is None else key_embed_dim
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("key_embed_dim", key_embed_dim)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if groups < 1 or num_heads % groups:
            raise ValueError(f"groups={groups} must divide num_heads={num_heads}")
        if rank < 0:
            raise ValueError(f"rank={rank} must be at least 0")
        self.embed_dim, self.num_heads, self.rank, self.groups, self.gate_std = embed_dim, num_heads, rank, groups, gate_std
        self.key_embed_dim = key_embed_dim
        self.query_wise, self.key_wise, self.gates, self.static = query_wise, key_wise, gates, static
        self.pre, self.post = pre, post
        n = num_heads // groups
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.sides = [name for name, on in (("pre", pre), ("post", post)) if on]
        parts = (("query", query_wise), ("key", key_wise)) if self.sides and (rank or gates) else ()
        self.parts = [name for name, on in parts if on]
        self.pre_base = nn.Parameter(torch.empty(groups, n, n, **factory)) if static and pre else None
        self.post_base = nn.Parameter(torch.empty(groups, n, n, **factory)) if static and post else None

        def dynamic(size: int, parts: list[str]) -> _DynamicWeights | None:
            channels = len(self.sides) * len(parts)
            return _DynamicWeights(size, channels, groups, n, rank, gate_std if gates else None, factory) if channels else None

        # One module makes all channels, in the order [pre-query, pre-key, post-query, post-key]. Where the key side has hidden
        # states of another size it has a module of its own.
        self.split = key_embed_dim != embed_dim
        self.dynamic = dynamic(embed_dim, [p for p in self.parts if p == "query" or not self.split])
        self.dynamic_key = dynamic(key_embed_dim, [p for p in self.parts if p == "key"]) if self.split else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as the table above says."""
        for module in (self.dynamic, self.dynamic_key):
            if module is not None:
                module.reset_parameters()
        for base in (self.pre_base, self.post_base):
            if base is not None:
                nn.init.normal_(base, std=0.1 / math.sqrt(base.shape[-1]))

    @torch.no_grad()
    def reset_to_identity(self) -> None:
        """Draws parameters with which nothing is mixed until they are trained.

        The w2 half of `qkw`, `dd` and the static bases are zero, and learn from the first step. `dw1` and the w1 half are
        drawn as ever: behind the zero factor w2 their gradient is zero at the first step and not from the second on. With both
        halves zero neither would ever learn.
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

        Raises:
            ValueError: hidden states of the wrong shape.
        """
        _check_states("hidden", hidden, "embed_dim", self.embed_dim)
        _check_states("key_hidden", hidden if key_hidden is None else key_hidden, "key_embed_dim", self.key_embed_dim)
        weights = self._weights(hidden, key_hidden)
        pre, post = (
            Composition(base, weights.get((side, "query")), weights.get((side, "key")), self.groups)
            for side, base in (("pre", self.pre_base), ("post", self.post_base))
        )
        return pre, post

    def _weights(self, hidden: Tensor, key_hidden: Tensor | None) -> dict[tuple[str, str], Tensor]:
        if self.dynamic is not None and not self.split and key_hidden is None:
            names = [(side, part) for side in self.sides for part in self.parts]
            return dict(zip(names, self.dynamic(hidden, slice(None)), strict=True))
        weights: dict[tuple[str, str], Tensor] = {}
        for i, part in enumerate(self.parts):
            states = hidden if part == "query" or key_hidden is None else key_hidden
            module = self.dynamic_key if self.split and part == "key" else self.dynamic
            chosen = slice(None) if self.split else slice(i, None, len(self.parts))
            assert module is not None
            weights |= zip(((side, part) for side in self.sides), module(states, chosen), strict=True)
        return weights

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.embed_dim}, {self.num_heads}, rank={self.rank}, groups={self.groups}"


class DCMHA(nn.Module):
    """Takes the place of `nn.MultiheadAttention`: attention whose heads are composed (arXiv 2405.08553, Section 3).

    Arguments, parameter names and return values are those of `nn.MultiheadAttention`, whose state dict loads with
    `strict=False`; `from_mha` takes over a whole module. It works inside `nn.TransformerEncoderLayer`,
    `nn.TransformerDecoderLayer` and the stacks of them. Query-wise weights are made from `query`, key-wise ones from `key`.
    What differs:

    - A query that sees no key gets zeros (before the output projection), not NaN.
    - The weights are the composed ones: they may be negative and need not sum to one.
    - `is_causal` works without `attn_mask` too; then the queries are the last T of the S positions.
    - Bad input raises `ValueError`.

    Args:
        embed_dim: E, size of `query` and of the output.
        num_heads: N; D = E / N.
        dropout: share of the weights set to zero in training.
        bias: whether the projections have biases.
        add_bias_kv: whether a learned key and value follow the given ones. Added keys are visible to every query and have no
            key-wise weights.
        add_zero_attn: whether a zero key and value follow.
        kdim: size of `key`; E by default.
        vdim: size of `value`; E by default.
        batch_first: whether tensors are [batch, length, size] rather than [length, batch, size].
        num_kv_heads: K; a divisor of N, which is the default.
        window: W: a query sees only keys less than W positions away: with `is_causal` the last W keys, its own included.
        qk_norm: whether the queries and keys of each head are divided by their root mean square, with learned scales.
        backend: as in `dcformer.composed_attention`. Weights can be had from "auto" and "reference".
        compose: options of `Compose`: rank, groups, query_wise, key_wise, gates, static, pre, post, gate_std.

    Raises:
        ValueError: a size that is not positive or does not divide, a window below 1, a dropout outside 0 to 1.
    """

    # The fused inference paths of `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` read this attribute, and would run
    # plain attention on the projection weights. False keeps them on `forward`; here it says nothing about sizes.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        window: int | None = None,
        qk_norm: bool = False,
        backend: str = "auto",
        **compose: Any,
    ):
        super().__init__()
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim, "num_kv_heads": num_kv_heads}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        if window is not None and window < 1:
            raise ValueError(f"window={window} must be at least 1 (the query itself), or None for no window")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout={dropout} must be between 0 and 1")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.num_kv_heads, self.kdim, self.vdim = num_kv_heads, kdim, vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.window, self.backend = window, backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **factory))

        kv_size = num_kv_heads * self.head_dim
        self.sizes = [embed_dim, kv_size, kv_size]  # of the projected query, key and value
        packed = kdim == vdim == embed_dim
        self.in_proj_weight = parameter(sum(self.sizes), embed_dim) if packed else None
        self.q_proj_weight = None if packed else parameter(embed_dim, embed_dim)
        self.k_proj_weight = None if packed else parameter(kv_size, kdim)
        self.v_proj_weight = None if packed else parameter(kv_size, vdim)
        self.in_proj_bias = parameter(sum(self.sizes)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.bias_k = parameter(1, 1, kv_size) if add_bias_kv else None
        self.bias_v = parameter(1, 1, kv_size) if add_bias_kv else None
        self.q_norm = nn.RMSNorm(self.head_dim, eps=_RMS_EPS, **factory) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=_RMS_EPS, **factory) if qk_norm else nn.Identity()
        self.reset_parameters()
        self.compose = Compose(embed_dim, num_heads, key_embed_dim=kdim, **factory, **compose)

    def reset_parameters(self) -> None:
        """Draws the projections as `nn.MultiheadAttention` does."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for added in (self.bias_k, self.bias_v):
            if added is not None:
                nn.init.xavier_normal_(added)

    @classmethod
    def from_mha(cls, mha: nn.MultiheadAttention, **options: Any) -> Self:
        """A module with a copy of `mha`'s parameters, whose outputs equal those of `mha` until it is trained.

        Args:
            mha: what to start from; sizes, dropout, dtype, device, training mode and `requires_grad` are taken over.
            options: `backend` and options of `Compose`; see `Compose.reset_to_identity` for how these parameters start.

        Raises:
            ValueError: an option that would change the outputs.
        """
        for name in ("num_kv_heads", "window", "qk_norm"):
            if name in options:
                raise ValueError(
                    f"{name}={options[name]!r} would change the outputs; only backend and Compose's options do not"
                )
        like = mha.out_proj.weight
        module = cls(
            mha.embed_dim, mha.num_heads, mha.dropout, mha.in_proj_bias is not None, mha.bias_k is not None, mha.add_zero_attn,
            mha.kdim, mha.vdim, mha.batch_first, like.device, like.dtype, **options,
        )  # fmt: skip
        module.compose.reset_to_identity()
        module.load_state_dict({**module.state_dict(), **mha.state_dict()})
        for name, original in mha.named_parameters():
            module.get_parameter(name).requires_grad_(original.requires_grad)
        return module.train(mha.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of `query` to `key` and `value`.

        Args:
            query: [B, T, E] or [T, B, E] (see `batch_first`), or [T, E] for a single sequence. A nested tensor of sequences,
                which `nn.TransformerEncoder` makes of padded ones, is served for self-attention with `batch_first`.
            key: [B, S, kdim] or [S, B, kdim], or [S, kdim].
            value: [B, S, vdim] or [S, B, vdim], or [S, vdim].
            key_padding_mask: [B, S] or [S]; bool (True = not visible) or float (added to the composed scores).
            need_weights: whether the weights are returned, which takes memory for all T x S of them.
            attn_mask: [T, S] or [B N, T, S] ([N, T, S] for a single sequence), bool (True = not visible) or float.
            average_attn_weights: whether the weights are averaged over the heads.
            is_causal: whether no query sees a later key. Beside `attn_mask` it says that the mask is causal: both hold, and
                where T and S differ the mask alone.

        Returns:
            (output, weights): the output in the shape of `query`, and the composed weights [B, T, S], [B, N, T, S] where not
            averaged (without B for a single sequence), or `None`. In training they are those that dropout has left.

        Raises:
            ValueError: wrong shapes, devices or dtypes, or weights wanted from a backend that has none.
        """
        if query.is_nested:
            if not query is key is value or not (key_padding_mask is None and attn_mask is None) or need_weights:
                raise ValueError("query is a nested tensor; it needs key=value=query, need_weights=False and no mask")
            return self._forward_nested(query, is_causal), None
        if need_weights and self.backend not in ("auto", "reference"):
            raise ValueError(f"need_weights=True needs backend='auto' or 'reference'; {self.backend!r} makes no weights")
        single, self_attention = query.dim() == 2, key is query
        query, key, value = self._arrange(query, key, value)
        pre, post = self.compose(query, None if self_attention else key)
        q, k, v = self._project(query, key, value)
        (B, N, T, _), S, window = q.shape, k.shape[2], self.window
        is_causal = is_causal and (attn_mask is None or T == S)
        masks = []
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, [(S,) if single else (B, S)], q)
            masks.append(key_padding_mask.reshape(B, 1, 1, S))
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, [(T, S), (B * N, T, S)], q)
            masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (B, N)))
        added = (self.bias_k is not None) + self.add_zero_attn
        if added:
            k, v = self._longer(k, self.bias_k), self._longer(v, self.bias_v)
            pre, post = (c if c.key is None else c._replace(key=F.pad(c.key, (0, 0, 0, 0, 0, added))) for c in (pre, post))
            if is_causal or window is not None:  # these count from the last key, which is another one now
                masks.append(~visible_keys(T, S, is_causal, window, q.device))
                is_causal, window = False, None
            masks = [F.pad(mask, (0, added)) for mask in masks]
        visible: dict[str, Any] = {"attn_mask": _merge_masks(masks, q), "is_causal": is_causal, "window": window}
        weights = None
        if need_weights:
            weights = F.dropout(composed_weights(q, k, pre, post, **visible), self.dropout, self.training)
            out = weights.to(v.dtype) @ v.repeat_interleave(N // self.num_kv_heads, dim=1)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            dropout = self.dropout if self.training else 0.0
            out = composed_attention(q, k, v, pre, post, dropout_p=dropout, backend=self.backend, **visible)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if single:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _forward_nested(self, sequences: Tensor, is_causal: bool) -> Tensor:
        """Self-attention of a nested tensor: padded, attended to, and nested again."""
        if not self.batch_first:
            raise ValueError("query is a nested tensor, which needs batch_first=True")
        lengths = [sequence.shape[0] for sequence in sequences.unbind()]
        padded = torch.nested.to_padded_tensor(sequences, 0.0)
        positions = torch.arange(padded.shape[1], device=padded.device)
        padding = positions >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = self(padded, padded, padded, padding, need_weights=False, is_causal=is_causal)
        rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=sequences.layout)

    def _arrange(self, *streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as [B, L, size], checked."""
        parameter, layout = self.out_proj.weight, "batch, length" if self.batch_first else "length, batch"
        sizes = (("query", "embed_dim", self.embed_dim), ("key", "kdim", self.kdim), ("value", "vdim", self.vdim))
        for x, (name, size_name, size) in zip(streams, sizes, strict=True):
            if x.dim() != streams[0].dim() or x.dim() not in (2, 3) or x.shape[-1] != size:
                expected = f"[{layout}, {size_name}={size}], or without batch as query, key and value alike"
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {expected}")
            if x.device != parameter.device:
                raise ValueError(f"{name} is on {x.device} and the parameters on {parameter.device}; move them to one device")
            if x.dtype != parameter.dtype and not torch.is_autocast_enabled(x.device.type):
                raise ValueError(f"{name} has dtype {x.dtype}; it must be {parameter.dtype} as the parameters, or use autocast")
        query, key, value = (x[None] if x.dim() == 2 else x if self.batch_first else x.transpose(0, 1) for x in streams)
        if key.shape[:2] != value.shape[:2] or key.shape[0] != query.shape[0]:
            shapes = ", ".join(str(tuple(x.shape)) for x in streams)
            raise ValueError(f"query, key and value are {shapes}; batch sizes, and lengths of key and value, must be equal")
        return query, key, value

    def _project(self, *streams: Tensor) -> list[Tensor]:
        """Query, key and value [B, L, size] to [B, N, T, D], [B, K, S, D], [B, K, S, D]."""
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.split(self.sizes)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(self.sizes)
        norms = (self.q_norm, self.k_norm, nn.Identity())
        heads = [x.unflatten(2, (-1, self.head_dim)) for x in map(F.linear, streams, weights, biases)]
        return [norm(x).transpose(1, 2) for norm, x in zip(norms, heads, strict=True)]

    def _longer(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Keys or values [B, K, S, D] with those of `add_bias_kv` and `add_zero_attn` behind them."""
        if bias is not None:
            x = torch.cat([x, bias.view(1, -1, 1, self.head_dim).expand(x.shape[0], -1, -1, -1)], dim=2)
        return F.pad(x, (0, 0, 0, int(self.add_zero_attn)))


def _check_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]], like: Tensor) -> None:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}; it must be bool (True = not visible) or floating point")
    if mask.shape not in shapes:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}; it must be {' or '.join(map(str, shapes))}")
    if mask.device != like.device:
        raise ValueError(f"{name} is on {mask.device} and query on {like.device}; move them to one device")


def _merge_masks(masks: list[Tensor], like: Tensor) -> Tensor | None:
    """Masks of `nn.MultiheadAttention` (bool: True = not visible) as the one of `composed_attention` (bool: True = visible)."""
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~reduce(torch.logical_or, masks)
    zero = like.new_zeros(())
    return reduce(torch.add, (zero.masked_fill(m, -math.inf) if m.dtype == torch.bool else m.to(like.dtype) for m in masks))
