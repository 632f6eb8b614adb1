"""Random MaxText parameter trees, and what the authors' JAX model computes from one: by einsum, straight from the tree.

b batch, t queries, s keys, e hidden size, n heads, d head dim, g groups, m and o heads of a group, c channels, i inner, r rank,
f MLP.
"""

import numpy as np
import torch
import torch.nn.functional as F

E, N, D, V = 24, 4, 8, 31


def tree(blocks, period, *, kv_heads=N, groups=1, static=False, qk_norm=True, mgate=0, mlp=40):
    """Arrays by dotted name, as MaxText stacks them; a sub-layer of the window pattern has the blocks' layers in axis 1."""
    numbers = np.random.default_rng(torch.randint(2**31, ()).item())
    m = N // groups
    layer = {
        "pre_self_attention_layer_norm_{}.scale": (E,),
        "post_self_attention_layer_norm_{}.scale": (E,),
        "self_attention_{}.query.kernel": (E, N, D),
        "self_attention_{}.key.kernel": (E, kv_heads, D),
        "self_attention_{}.value.kernel": (E, kv_heads, D),
        "self_attention_{}.out.kernel": (N, D, E),
        "self_attention_{}.AttentionOp_0.dyn_w_proj.dw1.kernel": (E, groups, 4, 4 * m),
        "self_attention_{}.AttentionOp_0.dyn_w_proj.qkw": (groups, 4, 4 * m, 4, m),
        "self_attention_{}.AttentionOp_0.dyn_w_proj.dd.kernel": (E, groups, 4 * m),
        "mlp_{}.wi_0.kernel": (E, mlp),
        "mlp_{}.wi_1.kernel": (E, mlp),
        "mlp_{}.wo.kernel": (mlp, E),
    }
    if qk_norm:
        layer |= {"self_attention_{}.q_norm.scale": (D,), "self_attention_{}.k_norm.scale": (D,)}
    if static:
        layer |= {f"self_attention_{{}}.AttentionOp_0.{side}_proj.w": (groups, m, m) for side in ("pre", "post")}
    if mgate:
        layer["mlp_{}.mgate.kernel"] = (E, mgate)
    top = {"token_embedder.embedding": (V, E), "decoder.decoder_norm.scale": (E,), "decoder.logits_dense.kernel": (E, V)}
    for i in range(period):
        for name, (first, *rest) in layer.items():
            top[f"decoder.layers.{name.format(i)}"] = (first, blocks, *rest)
    return {name: numbers.normal(0, 0.3, shape).astype(np.float32) for name, shape in top.items()}


def nested(flat):
    """The tree that the dotted names stand for."""
    result = {}
    for name, array in flat.items():
        *parents, last = name.split(".")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return result


@torch.no_grad()
def logits(flat, ids, windows, *, eps):
    """What the model computes; `windows` has one entry a layer of the pattern, None for a global one."""
    w = {name: torch.tensor(array) for name, array in flat.items()}
    x = w["token_embedder.embedding"][ids]
    blocks = w["decoder.layers.mlp_0.wo.kernel"].shape[1]
    for block in range(blocks):
        for i, window in enumerate(windows):
            ours = {
                n.removeprefix("decoder.layers."): a.select(1, block) for n, a in w.items() if n.startswith("decoder.layers.")
            }
            x = x + _attention(_norm(x, ours, f"pre_self_attention_layer_norm_{i}", eps), ours, i, window)
            x = x + _mlp(_norm(x, ours, f"post_self_attention_layer_norm_{i}", eps), ours, f"mlp_{i}")
    return _norm(x, w, "decoder.decoder_norm", eps) @ w["decoder.logits_dense.kernel"]


def _norm(x, w, name, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.scale"]


def _linear(equation, x, w, name):
    return torch.einsum(equation, x, w[f"{name}.kernel"])


def _mlp(h, w, name):
    inner = F.silu(_linear("bte,ef->btf", h, w, f"{name}.wi_0")) * _linear("bte,ef->btf", h, w, f"{name}.wi_1")
    if f"{name}.mgate.kernel" in w:
        gates = _linear("bte,ek->btk", h, w, f"{name}.mgate").softmax(-1)
        inner = (inner.unflatten(-1, (gates.shape[-1], -1)) * gates[..., None]).flatten(-2)
    return _linear("btf,fe->bte", inner, w, f"{name}.wo")


def _attention(h, w, i, window):
    name, (T, positions) = f"self_attention_{i}", (h.shape[1], torch.arange(h.shape[1]))
    query, key, value = (_linear("bte,end->btnd", h, w, f"{name}.{part}") for part in ("query", "key", "value"))
    key, value = (states.repeat_interleave(N // states.shape[2], 2) for states in (key, value))
    if f"{name}.q_norm.scale" in w:
        query, key = _norm(query, w, f"{name}.q_norm", 1e-6), _norm(key, w, f"{name}.k_norm", 1e-6)
    query, key = _turned(query, positions), _turned(key, positions)
    scores = torch.einsum("btnd,bsnd->bnts", query / D**0.5, key)
    behind = positions[:, None] - positions
    hidden = (behind < 0) | (behind >= (T if window is None else window))
    pre, post = _mixing(h, w, f"{name}.AttentionOp_0")
    weights = post(pre(scores).masked_fill(hidden, -torch.inf).softmax(-1))
    return _linear("btnd,nde->bte", torch.einsum("bnts,bsnd->btnd", weights, value), w, f"{name}.out")


def _turned(x, positions):
    angle = positions[:, None, None] / 10000 ** (torch.arange(0, D, 2) / D)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def _mixing(h, w, name):
    inner = F.gelu(torch.einsum("bte,egci->btgci", h, w[f"{name}.dyn_w_proj.dw1.kernel"]))
    w1, w2 = torch.einsum("btgci,gcirm->btgcrm", inner, w[f"{name}.dyn_w_proj.qkw"]).chunk(2, -2)
    w1 = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gates = torch.einsum("bte,egk->btgk", h, w[f"{name}.dyn_w_proj.dd.kernel"]).tanh().unflatten(-1, (4, -1))

    def side(first, which):
        def mix(x):
            x = x.unflatten(1, (gates.shape[2], -1))
            mixed = x + torch.einsum("bgmts,gmo->bgots", x, w[f"{name}.{which}_proj.w"]) if f"{name}.{which}_proj.w" in w else x
            for c, at in ((first, "t"), (first + 1, "s")):
                low = torch.einsum(f"bgmts,b{at}grm->bgrts", x, w1[:, :, :, c])
                mixed = mixed + torch.einsum(f"bgrts,b{at}grm->bgmts", low, w2[:, :, :, c])
                mixed = mixed + torch.einsum(f"bgmts,b{at}gm->bgmts", x, gates[:, :, :, c])
            return mixed.flatten(1, 2)

        return mix

    return side(0, "pre"), side(2, "post")
