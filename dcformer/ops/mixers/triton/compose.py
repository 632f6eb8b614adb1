"""Composition of a tile of scores inside a kernel, forward and backward, and where its weights lie.

A program holds all n heads of one group for a tile of queries and keys: a tuple of n tiles [BT, BS], so that mixing heads is
arithmetic between registers of one thread. Loops over heads and ranks are unrolled.

B batch, C queries, S keys, N heads = G groups of n, R rank; BT, BS queries and keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(C, S, G, lower, upper, BT: tl.constexpr, BS: tl.constexpr):
    """Of this program: batch, group, numbers of the tile along queries and keys, its queries [BT, 1], its keys [1, BS], and
    whether any of its pairs is visible. Everything is 64 bits wide, and so are offsets made from it."""
    i_tile = tl.program_id(0).to(tl.int64)
    n_s, n_t = tl.cdiv(S, BS), tl.cdiv(C, BT)
    i_s, i_t, i_bg = i_tile % n_s, (i_tile // n_s) % n_t, i_tile // (n_s * n_t)
    o_t = i_t * BT + tl.arange(0, BT)[:, None]
    o_s = i_s * BS + tl.arange(0, BS)[None, :]
    some = (i_s * BS < i_t * BT + BT - 1 + upper) & (i_s * BS + BS > i_t * BT + lower)
    return i_bg // G, i_bg % G, i_t, i_s, o_t, o_s, some


@triton.jit
def weights_at(p_w, i_b, i_head, o, stride_b, stride, stride_head):
    """Where the weights of a group lie for each query or key, or its static ones; `None` where there are none."""
    return None if p_w is None else p_w + i_b * stride_b + o * stride + i_head * stride_head


@triton.jit
def load_heads(p_x, stride, mask, n: tl.constexpr):
    """n tiles, `stride` apart."""
    xs = ()
    for i in tl.static_range(n):
        xs = xs + (tl.load(p_x + i * stride, mask=mask, other=0.0),)  # noqa: RUF005 (Triton has no starred tuples)
    return xs


@triton.jit
def store_heads(p_x, stride, mask, xs, n: tl.constexpr):
    """The opposite of `load_heads`."""
    for i in tl.static_range(n):
        tl.store(p_x + i * stride, xs[i], mask=mask)


@triton.jit
def softmax(p_a, p_statistics, C, S, m_t, m_x, n: tl.constexpr):
    """exp(a - largest) / sum of n heads; 0 outside the block."""
    ps = ()
    for i in tl.static_range(n):
        a = tl.load(p_a + i * C * S, mask=m_x, other=-float("inf"))
        largest = tl.load(p_statistics + 2 * i * C, mask=m_t, other=0.0)
        total = tl.load(p_statistics + 2 * i * C + 1, mask=m_t, other=1.0)
        ps = ps + (tl.exp(a - largest) / total,)  # noqa: RUF005
    return ps


@triton.jit
def dots(xs, p_w, stride_head, mask, n: tl.constexpr):
    """sum_n x[n] w[n], with the weights of a rank at `p_w`: [BT, 1] or [1, BS]."""
    h = xs[0] * tl.load(p_w, mask=mask, other=0.0)
    for i in tl.static_range(1, n):
        h += xs[i] * tl.load(p_w + i * stride_head, mask=mask, other=0.0)
    return h


@triton.jit
def hidden(xs, p_w, stride_row, stride_head, mask, n: tl.constexpr, R: tl.constexpr):
    """The mixed sums of R ranks, whose rows begin at `p_w`."""
    hs = ()
    for r in tl.static_range(R):
        hs = hs + (dots(xs, p_w + r * stride_row, stride_head, mask, n),)  # noqa: RUF005
    return hs


@triton.jit
def spread(y, x, hs, p_w, stride_row, mask, gate_row: tl.constexpr, first_row: tl.constexpr, R: tl.constexpr):
    """y + x gate + sum_r h[r] w[r] for one head, `p_w` pointing at its row 0."""
    y += x * tl.load(p_w + gate_row * stride_row, mask=mask, other=0.0)
    for r in tl.static_range(R):
        y += hs[r] * tl.load(p_w + (first_row + r) * stride_row, mask=mask, other=0.0)
    return y


@triton.jit
def mix(xs, p_base, p_q, p_k, q_row, k_row, k_head, m_t, m_s, n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
        BACK: tl.constexpr):  # fmt: skip
    """y = Compose(x) or, with BACK, the gradient of x from that of y: w1 and w2 change places.

    `p_base`, `p_q` [BT, 1] and `p_k` [1, BS] point at the group's first head; missing ones are `None` and cost nothing.
    """
    FIRST: tl.constexpr = 1 if BACK else 0
    if p_q is not None:
        hq = hidden(xs, p_q + FIRST * R_Q * q_row, q_row, 1, m_t, n, R_Q)
    if p_k is not None:
        hk = hidden(xs, p_k + FIRST * R_K * k_row, k_row, k_head, m_s, n, R_K)
    ys = ()
    for m in tl.static_range(n):
        y = xs[m]
        if p_q is not None:
            y = spread(y, xs[m], hq, p_q + m, q_row, m_t, 2 * R_Q, (1 - FIRST) * R_Q, R_Q)
        if p_k is not None:
            y = spread(y, xs[m], hk, p_k + m * k_head, k_row, m_s, 2 * R_K, (1 - FIRST) * R_K, R_K)
        if p_base is not None:
            for i in tl.static_range(n):
                y += xs[i] * tl.load(p_base + (m * n + i if BACK else i * n + m))
        ys = ys + (y,)  # noqa: RUF005
    return ys


@triton.jit
def grads_of_weights(
    xs, dys, p_w, p_dw, w_row, w_head, d_row, d_head, m_w, AXIS: tl.constexpr, n: tl.constexpr, R: tl.constexpr
):
    """Gradients of query-wise (AXIS = 1) or key-wise (AXIS = 0) weights from one tile, to `p_dw` [BT, 1] or [1, BS]."""
    hs = hidden(xs, p_w, w_row, w_head, m_w, n, R)
    dhs = hidden(dys, p_w + R * w_row, w_row, w_head, m_w, n, R)
    for i in tl.static_range(n):
        p_head = p_dw + i * d_head
        for r in tl.static_range(R):
            tl.store(p_head + r * d_row, tl.expand_dims(tl.sum(dhs[r] * xs[i], AXIS), AXIS), mask=m_w)
            tl.store(p_head + (R + r) * d_row, tl.expand_dims(tl.sum(hs[r] * dys[i], AXIS), AXIS), mask=m_w)
        tl.store(p_head + 2 * R * d_row, tl.expand_dims(tl.sum(xs[i] * dys[i], AXIS), AXIS), mask=m_w)
