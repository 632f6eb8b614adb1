"""The equations of the paper written once more, with one N x N matrix for every pair, and what the tests of nn share.

B batch, T queries, S keys, N heads (n in a group), R rank, D head dim.
"""

import math

import torch
import torch.nn.functional as F

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64, whose sums only differ in order
ABLATIONS = [
    {},
    {"rank": 1},
    {"rank": 0},
    {"groups": 2},
    {"query_wise": False},
    {"key_wise": False},
    {"gates": False},
    {"static": True},
    {"static": True, "groups": 2, "rank": 3},
    {"static": True, "query_wise": False, "key_wise": False},
    {"static": True, "rank": 0, "gates": False},
    {"rank": 0, "gates": False},
    {"pre": False},
    {"post": False, "static": True},
    {"pre": False, "post": False},
]


def name(options):
    return " ".join(f"{key}={value}" for key, value in options.items()) or "paper"


def randomize(module, std=0.5):
    """Parameters under which composition changes the output by about as much as the attention itself."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std / math.sqrt(max(1, parameter.shape[0] if parameter.dim() > 1 else 1)))
    return module


def double(module):
    return randomize(module.double())


def weights_by_hand(compose, side, part, states):
    """(w1 [B,L,R,N], w2 [B,L,R,N], gate [B,L,N]) of one channel, or None: equations of the paper, loops over groups."""
    if part not in compose.parts or side not in compose.sides:
        return None
    if compose.split:
        module = compose.dynamic if part == "query" else compose.dynamic_key
        channels = [(s, part) for s in compose.sides]
    else:
        module = compose.dynamic
        channels = [(s, p) for s in compose.sides for p in compose.parts]
    c, R, n = channels.index((side, part)), compose.rank, compose.num_heads // compose.groups
    w1s, w2s, gates = [], [], []
    for g in range(compose.groups):
        if R:
            inner = F.gelu(states @ module.dw1[:, g, c])  # [B, L, I]
            both = torch.einsum("bli,irn->blrn", inner, module.qkw[g, c])
            w1 = both[:, :, :R]
            w1s.append(w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt())
            w2s.append(both[:, :, R:])
        if compose.gates:
            gates.append(torch.tanh(states @ module.dd[:, g, c * n : (c + 1) * n]))
    empty = states.new_zeros(*states.shape[:2], 0, compose.num_heads)
    zero = states.new_zeros(*states.shape[:2], compose.num_heads)
    return torch.cat(w1s, -1) if R else empty, torch.cat(w2s, -1) if R else empty, torch.cat(gates, -1) if gates else zero


def mix_by_hand(compose, side, x, hidden, key_hidden):
    """Compose(x) with one N x N matrix for every pair: x [B, N, T, S]."""
    B, N, T, S = x.shape
    group = torch.arange(N) // (N // compose.groups)
    together = (group[:, None] == group).to(x.dtype)  # heads of different groups do not meet
    matrix = torch.eye(N, dtype=x.dtype).expand(B, T, S, N, N)
    base = getattr(compose, f"{side}_base")
    if base is not None:
        matrix = matrix + torch.block_diag(*base)
    for part, states, place in (("query", hidden, 2), ("key", key_hidden, 1)):
        made = weights_by_hand(compose, side, part, states)
        if made is not None:
            w1, w2, gate = made
            own = torch.einsum("blrn,blrm->blnm", w1, w2) * together + torch.diag_embed(gate)
            matrix = matrix + own.unsqueeze(place)
    return torch.einsum("bnts,btsnm->bmts", x, matrix)


def dcmha_by_hand(module, query, key, value, visible=None):
    """(output, weights) for [B, L, size] inputs: projections as in `nn.MultiheadAttention`, then the equations."""
    E, K, D = module.embed_dim, module.num_kv_heads, module.head_dim
    if module.in_proj_weight is not None:
        wq, wk, wv = module.in_proj_weight[:E], module.in_proj_weight[E : E + K * D], module.in_proj_weight[E + K * D :]
    else:
        wq, wk, wv = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    bq, bk, bv = module.in_proj_bias[:E], module.in_proj_bias[E : E + K * D], module.in_proj_bias[E + K * D :]
    q, k, v = (
        (x @ w.T + b).unflatten(2, (-1, D)).transpose(1, 2) for x, w, b in ((query, wq, bq), (key, wk, bk), (value, wv, bv))
    )
    k, v = (x.repeat_interleave(module.num_heads // K, dim=1) for x in (k, v))
    scores = mix_by_hand(module.compose, "pre", q @ k.transpose(2, 3) / math.sqrt(D), query, key)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = mix_by_hand(module.compose, "post", scores.softmax(-1), query, key)
    return module.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def draw_mask(kind, B, N, T, S, dtype):
    """A mask of `nn.MultiheadAttention` that leaves the first key visible to everybody."""
    if kind is None:
        return None
    style, dims = kind.split()
    hidden = torch.rand({"2d": (T, S), "3d": (B * N, T, S), "padding": (B, S)}[dims]) > 0.6
    hidden[..., 0] = False
    if style == "bool":
        return hidden
    return torch.randn(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)
