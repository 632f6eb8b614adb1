"""Composition of a tile of scores inside a kernel, forward and backward, and which tile a program has.

A program holds the n heads of one group (padded to NP) for BT queries and BS keys, a tile [BT, NP, BS], and walks over CHUNK
queries. Lanes lie along keys first and heads second, so that sums over heads need few exchanges between threads.

B batch, C queries, S keys, N heads = G groups of n, R rank. Weights come as tiles of pointers to their row 0: query-wise
[BT, NP, 1], key-wise [1, NP, BS]; `row` is the way from a row to the next. Parts that are `None` are compiled away.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(C, S, lower, upper, G: tl.constexpr, CHUNK: tl.constexpr, BS: tl.constexpr):
    """Of this program: batch, group, chunk and tile of keys, its queries from first to last, and whether any pair is visible.

    Batch and group are 64 bits wide, and so are offsets made from them.
    """
    n_s, n_c = tl.cdiv(S, BS), tl.cdiv(C, CHUNK)
    i = tl.program_id(0)
    i_s, i_c, i_bg = i % n_s, (i // n_s) % n_c, i // (n_s * n_c)
    first = i_c * CHUNK
    last = tl.minimum(C, first + CHUNK)
    some = (i_s * BS < last - 1 + upper) & (i_s * BS + BS > first + lower)
    return (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64), i_c, i_s, first, last, some


@triton.jit
def sums(x, p_w, row, mask, FIRST: tl.constexpr, R: tl.constexpr):
    """sum_n x[n] w[n] for the R rows from FIRST on: a tuple of tiles [BT, 1, BS]."""
    hs = ()
    for r in tl.static_range(R):
        w = tl.load(p_w + tl.cast(row, tl.int64) * (FIRST + r), mask=mask, other=0.0)
        hs = hs + (tl.sum(x * w, 1, keep_dims=True),)  # noqa: RUF005 (Triton has no starred tuples)
    return hs


@triton.jit
def spread(y, x, hs, p_w, row, mask, FIRST: tl.constexpr, R: tl.constexpr):
    """y + x gate + sum_r h[r] w[r], with the rows from FIRST on."""
    y += x * tl.load(p_w + tl.cast(row, tl.int64) * (2 * R), mask=mask, other=0.0)
    for r in tl.static_range(R):
        y += hs[r] * tl.load(p_w + tl.cast(row, tl.int64) * (FIRST + r), mask=mask, other=0.0)
    return y


@triton.jit
def static(x, p_base, n: tl.constexpr, BACK: tl.constexpr):
    """sum_n x[n] base[n,m] or, with BACK, sum_m x[m] base[n,m]."""
    BT: tl.constexpr = x.shape[0]
    NP: tl.constexpr = x.shape[1]
    into, of = tl.arange(0, NP)[:, None], tl.arange(0, NP)[None, :]
    p_w = p_base + into * n + of if BACK else p_base + of * n + into
    w = tl.load(p_w, mask=(into < n) & (of < n), other=0.0).to(tl.float32)
    return tl.dot(tl.broadcast_to(w[None, :, :], [BT, NP, NP]), x, input_precision="tf32x3")


@triton.jit
def over_keys(x, dy):
    """sum_s x[n,s] dy[m,s], [BT, NP, NP]. Triton 3.6 wants 16 keys in a product: a narrower tile gets zeros between them."""
    BT: tl.constexpr = x.shape[0]
    NP: tl.constexpr = x.shape[1]
    BS: tl.constexpr = x.shape[2]
    if BS < 16:
        x = tl.reshape(tl.join(x, tl.zeros_like(x)), [BT, NP, 2 * BS])
        dy = tl.reshape(tl.join(dy, tl.zeros_like(dy)), [BT, NP, 2 * BS])
    return tl.dot(x, tl.permute(dy, (0, 2, 1)), input_precision="tf32x3")


@triton.jit
def mix(
    x, p_base, p_q, q_row, m_q, p_k, k_row, m_k,
    n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """y = Compose(x) with the mixed sums of queries and keys or, with BACK, the gradient of x from that of y, with theirs."""
    hq = ()
    hk = ()
    if p_q is not None:
        hq = sums(x, p_q, q_row, m_q, R_Q if BACK else 0, R_Q)
    if p_k is not None:
        hk = sums(x, p_k, k_row, m_k, R_K if BACK else 0, R_K)
    y = x
    if p_q is not None:
        y = spread(y, x, hq, p_q, q_row, m_q, 0 if BACK else R_Q, R_Q)
    if p_k is not None:
        y = spread(y, x, hk, p_k, k_row, m_k, 0 if BACK else R_K, R_K)
    if p_base is not None:
        y += static(x, p_base, n, BACK)
    return y, hq, hk


@triton.jit
def masked(y, visible, p_mask, m_x):
    """y + mask, -inf where not visible; `p_mask` is a tile of pointers, to bytes or floats, or `None`."""
    if p_mask is not None:
        if p_mask.dtype.element_ty == tl.int8:
            visible = visible & (tl.load(p_mask, mask=m_x, other=0) != 0)
        else:
            y += tl.load(p_mask, mask=m_x, other=0.0)
    return tl.where(visible, y, -float("inf"))


@triton.jit
def clear(p_out, o_t_stride, o_n, m_ns, first, last, BT: tl.constexpr):
    """Zeros where a program has nothing to compute; `p_out` [1, 1, BS] and `o_n` [1, NP, 1] lead to query 0."""
    for t in range(first, last, BT):
        o_t = t + tl.arange(0, BT)[:, None, None]
        m = (o_t < last) & m_ns
        tl.store(p_out + o_n + o_t * o_t_stride, tl.zeros(m.shape, p_out.dtype.element_ty), mask=m)


@triton.jit
def weight_grads(x, dy, hs, dhs, AXIS: tl.constexpr, R: tl.constexpr):
    """Gradients of the 2R+1 rows of query-wise (AXIS = 2) or key-wise (AXIS = 0) weights from one tile."""
    grads = ()
    for r in tl.static_range(R):
        grads = grads + (tl.sum(dhs[r] * x, AXIS, keep_dims=True),)  # noqa: RUF005
    for r in tl.static_range(R):
        grads = grads + (tl.sum(hs[r] * dy, AXIS, keep_dims=True),)  # noqa: RUF005
    return grads + (tl.sum(x * dy, AXIS, keep_dims=True),)  # noqa: RUF005


@triton.jit
def zeros(ROWS: tl.constexpr, NP: tl.constexpr, BS: tl.constexpr):
    """A sum of `weight_grads` of keys before its first term."""
    rows = ()
    for _ in tl.static_range(ROWS):
        rows = rows + (tl.zeros([1, NP, BS], tl.float32),)  # noqa: RUF005
    return rows


@triton.jit
def added(a, b, ROWS: tl.constexpr):
    """a + b, row by row."""
    rows = ()
    for r in tl.static_range(ROWS):
        rows = rows + (a[r] + b[r],)  # noqa: RUF005
    return rows


@triton.jit
def store_rows(p_out, row, mask, rows, ROWS: tl.constexpr):
    """Rows `row` apart."""
    for r in tl.static_range(ROWS):
        tl.store(p_out + r * row, rows[r], mask=mask)
