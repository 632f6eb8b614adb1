"""The released models once more, from the equations of the paper: one N x N matrix for every pair of query and key.

B batch, T length, N heads, K key/value heads, D head dim, R rank, E hidden size.
"""

import math

import torch
import torch.nn.functional as F

PATTERNS = {None: "LG", "LG": "LG", "LGLL": "LGLL", "LGL6": "LGLLLLLL"}


def draw_weights(config, **options):
    """Random parameters by released name, large enough that no part of the model is lost below the tolerance."""
    E, N, F_, D = config["dim"], config["n_head"], config["intermediate_size"], config["dim"] // config["n_head"]
    K = config.get("n_local_heads", N)
    pythia = config["model_type"] == "dcpythia"

    def matrix(rows, columns, std=1.0):
        return torch.randn(rows, columns, **options) * std / math.sqrt(columns)

    weights = {"tok_embeddings.weight": torch.randn(config["vocab_size"], E, **options)}
    weights["output.weight"] = matrix(config["vocab_size"], E)
    norms, linears = ["norm"], {}
    for i in range(config["n_layer"]):
        layer = f"layers.{i}."
        norms += [f"{layer}attention_norm", f"{layer}ffn_norm"]
        linears |= {f"{layer}attention.wqkv": ((N + 2 * K) * D, E), f"{layer}attention.wo": (E, E)}
        linears |= {f"{layer}feed_forward.w1": (F_, E), f"{layer}feed_forward.w2": (E, F_)}
        if not pythia:
            linears[f"{layer}feed_forward.w3"] = (F_, E)
        if config.get("mgate"):
            weights[f"{layer}feed_forward.mg.weight"] = matrix(config["mgate_dim"], E, 3)
        if config.get("use_qk_norm"):
            weights[f"{layer}attention.q_norm.scale"] = torch.rand(D, **options) + 0.5
            weights[f"{layer}attention.k_norm.scale"] = torch.rand(D, **options) + 0.5
        if config.get("use_dcmha", True):
            dynamic = f"{layer}attention.dyn_w_proj."
            weights[f"{dynamic}dw1"] = torch.randn(E, 1, 4, 4 * N, **options) / math.sqrt(E)
            weights[f"{dynamic}qkw"] = torch.randn(1, 4, 4 * N, 4, N, **options) / N
            weights[f"{dynamic}dd"] = torch.randn(E, 1, 4 * N, **options) / math.sqrt(E)
    for name in norms:
        weights[f"{name}.weight"] = torch.rand(E, **options) + 0.5
        if pythia:
            weights[f"{name}.bias"] = torch.randn(E, **options) * 0.3
    for name, shape in linears.items():
        weights[f"{name}.weight"] = matrix(*shape)
        if pythia and config.get("use_linear_bias", True):
            weights[f"{name}.bias"] = torch.randn(shape[0], **options) * 0.3
    return weights


def logits_by_hand(weights, config, ids):
    """Logits [B, T, V] in float64 of token ids [B, T]."""
    weights = {name: weight.double() for name, weight in weights.items()}
    hidden = weights["tok_embeddings.weight"][ids]
    pattern = PATTERNS[config.get("window_type")]
    for i in range(config["n_layer"]):
        layer = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        window = config.get("window_size") if pattern[i % len(pattern)] == "L" else None
        attended = hidden + _attention(layer, config, _norm(layer, "attention_norm", config, hidden), window)
        parallel = config["model_type"] == "dcpythia" and config.get("use_parallel_residual", True)
        hidden = attended + _mlp(layer, config, _norm(layer, "ffn_norm", config, hidden if parallel else attended))
    return _norm(weights, "norm", config, hidden) @ weights["output.weight"].T


def _linear(weights, name, x):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def _norm(weights, name, config, x):
    if config["model_type"] == "dcpythia":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config["norm_eps"]).sqrt()
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)


def _mlp(layer, config, x):
    if config["model_type"] == "dcpythia":
        inner = F.gelu(_linear(layer, "feed_forward.w1", x))
    else:
        inner = F.silu(_linear(layer, "feed_forward.w1", x)) * _linear(layer, "feed_forward.w3", x)
    if config.get("mgate"):
        gates = _linear(layer, "feed_forward.mg", x).softmax(-1)
        inner = inner * gates.repeat_interleave(inner.shape[-1] // gates.shape[-1], -1)
    return _linear(layer, "feed_forward.w2", inner)


def _rotated(x, config):
    """x [B, N, T, D] with channel pairs (d, d + half) of the first `rotary_pct` turned."""
    turned = int(x.shape[-1] * config.get("rotary_pct", 0.25)) if config["model_type"] == "dcpythia" else x.shape[-1]
    half = turned // 2
    speed = config["rope_base"] ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * speed
    a, b = x[..., :half], x[..., half:turned]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), x[..., turned:]], -1)


def _attention(layer, config, x, window):
    N, D = config["n_head"], config["dim"] // config["n_head"]
    K = config.get("n_local_heads", N)
    heads = _linear(layer, "attention.wqkv", x).unflatten(-1, (N + 2 * K, D)).transpose(1, 2)
    q, k, v = heads.split([N, K, K], 1)
    if config.get("use_qk_norm"):
        q, k = (
            h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer[f"attention.{name}_norm.scale"]
            for h, name in ((q, "q"), (k, "k"))
        )
    q, k = _rotated(q, config), _rotated(k, config)
    k, v = (h.repeat_interleave(N // K, 1) for h in (k, v))
    T = x.shape[1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    visible = (distance >= 0) & (distance < (window or T))
    pre, post = _matrices(layer, config, x)
    scores = torch.einsum("bnts,btsnm->bmts", q @ k.transpose(2, 3) / math.sqrt(D), pre).masked_fill(~visible, -math.inf)
    probabilities = torch.einsum("bnts,btsnm->bmts", scores.softmax(-1), post)
    return _linear(layer, "attention.wo", (probabilities @ v).transpose(1, 2).flatten(2))


def _matrices(layer, config, x):
    """What mixes the scores and what mixes the weights, [B, T, S, N, N] each."""
    (B, T, _), N = x.shape, config["n_head"]
    identity = torch.eye(N, dtype=x.dtype).expand(B, T, T, N, N)
    if not config.get("use_dcmha", True):
        return identity, identity
    dw1, qkw, dd = (layer[f"attention.dyn_w_proj.{name}"] for name in ("dw1", "qkw", "dd"))
    channels = []  # pre-query, pre-key, post-query, post-key: [B, T, N, N] each
    for c in range(4):
        both = torch.einsum("bti,irn->btrn", F.gelu(x @ dw1[:, 0, c]), qkw[0, c])
        w1, w2 = both[:, :, :2], both[:, :, 2:]
        w1 = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        gate = torch.tanh(x @ dd[:, 0, c * N : (c + 1) * N])
        channels.append(torch.einsum("btrn,btrm->btnm", w1, w2) + torch.diag_embed(gate))
    key_wise = 0 if config.get("query_wise") else 1
    return tuple(identity + channels[c][:, :, None] + key_wise * channels[c + 1][:, None] for c in (0, 2))
