"""Decoding kernels: few queries, the keys split over programs, products inside. Three launches.

`score_keys` makes composed scores and each split's row statistics; `weigh_values` unites these, makes weights and multiplies
them with its values; `add_splits` adds up the outputs in a fixed order. Keys, values and key-wise weights are read as they lie
in the cache. All heads of a group meet in a tile [BT, NP, BS] and the products are made a key head at a time, so the two
exchange scores and weights through memory that one program alone uses.

B batch, T queries, S keys, N heads = G groups of n, K key heads of H query heads, D and E channels of a key and of a value.
Keys from `start` to `stop` are visible to some query; a program has `length` of them, whole tiles of BS. Tiles of products have
BM rows, (head, query) pairs of one key head.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from dcformer.ops.mixers.triton.compose import masked, mix

# The interpreter's products of bfloat16 are garbage.
_IN_FLOAT32 = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def product(a, b):
    """a b in float32."""
    if _IN_FLOAT32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def split_of(splits, start, stop, length, G: tl.constexpr):
    """Of this program: batch and group, 64 bits wide, its split, and its keys from first to last."""
    i = tl.program_id(0)
    i_bg = i // splits
    first = start + i % splits * length
    return (i_bg // G).to(tl.int64), (i_bg % G).to(tl.int64), i % splits, first, tl.minimum(stop, first + length)


@triton.jit
def rows_of(i_k, i_g, T, n: tl.constexpr, H: tl.constexpr, BM: tl.constexpr):
    """Head, query and whether there is any, of the rows of a product with key head i_k. [BM]"""
    o_m = tl.arange(0, BM)
    o_n = i_k * H + o_m // T
    return o_n, o_m % T, (o_m < H * T) & (o_n >= i_g * n) & (o_n < i_g * n + n)


@triton.jit
def united(largest, total, largests, totals):
    """Largest score and sum of exp(score - largest) of rows, with those of further parts of the rows, along the last axis."""
    new = tl.maximum(largest, tl.max(largests, 2, keep_dims=True))
    finite = tl.where(new == -float("inf"), 0.0, new)
    return new, total * tl.exp(largest - finite) + tl.sum(totals * tl.exp(largests - finite), 2, keep_dims=True)


@triton.jit(do_not_specialize=[
    "q_b", "q_n", "q_t", "wq_b", "wq_t", "wq_row", "wq_n", "wk_b", "wk_s", "wk_n", "mask_b", "mask_n", "mask_t", "mask_s",
    "B", "T", "splits", "start", "stop", "length", "lower", "upper",
])  # fmt: skip
def score_keys(
    p_q, p_k, p_a, p_partial, p_base, p_wq, p_wk, p_mask,
    q_b, q_n, q_t, q_d, k_b, k_n, k_s, k_d, wq_b, wq_t, wq_row, wq_n, wk_b, wk_s, wk_row, wk_n, mask_b, mask_n, mask_t, mask_s,
    scale, B, T, splits, start, stop, length, lower, upper,
    G: tl.constexpr, n: tl.constexpr, H: tl.constexpr, D: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
    NP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """a = Compose(scale q k^T) + mask to `p_a` [B, N, T, splits * length], -inf where not visible.

    `p_partial` [2, B, N, T, splits]: of each row the largest a in the split and the sum of exp(a - largest). Where the mask
    hides a whole split, as it does most of a static cache at first, only these are written.
    """
    i_b, i_g, i_l, first, last = split_of(splits, start, stop, length, G)
    row = tl.cast(splits, tl.int64) * length
    o_r = tl.arange(0, NP)[None, :, None]
    o_n = i_g * n + o_r
    m_n = o_r < n
    i_row = (i_b * G * n + i_g * n) * T
    if p_mask is not None:
        some = 0
        for t in range(0, T, BT):
            o_t = t + tl.arange(0, BT)[:, None, None]
            for s in range(first, last, BS):
                o_s = s + tl.arange(0, BS)[None, None, :]
                m_x = (o_t < T) & m_n & (o_s < last)
                at_mask = p_mask + i_b * mask_b + o_n * mask_n + o_t * mask_t + o_s.to(tl.int64) * mask_s
                a = masked(tl.zeros([BT, NP, BS], tl.float32), m_x, at_mask, m_x)
                some = tl.maximum(some, tl.max((a > -float("inf")).to(tl.int32)))
        last = tl.where(some > 0, last, first)

    o_d, r_s = tl.arange(0, BD), tl.arange(0, BS)
    i_k0 = (i_g * n // H).to(tl.int32)
    shared = ((i_g * n + n - 1) // H).to(tl.int32) + 1 - i_k0
    for i in range(shared * tl.cdiv(last - first, BS)):
        i_k, s = i_k0 + i % shared, first + i // shared * BS
        o_mn, o_mt, m_m = rows_of(i_k, i_g, T, n, H, BM)
        at_q = p_q + i_b * q_b + (o_mn * q_n + o_mt * q_t)[:, None] + (o_d * q_d)[None, :]
        q = tl.load(at_q, mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
        at_k = p_k + (i_b * k_b + tl.cast(i_k, tl.int64) * k_n + tl.cast(s, tl.int64) * k_s)
        m_k = (s + r_s < last)[None, :] & (o_d < D)[:, None]
        k = tl.load(at_k + ((r_s * k_s)[None, :] + (o_d * k_d)[:, None]), mask=m_k, other=0.0)
        at_x = p_a + ((i_b * G * n + o_mn) * T + o_mt)[:, None] * row + (s - start + r_s)[None, :]
        tl.store(at_x, product(q, k) * scale, mask=m_m[:, None])
    tl.debug_barrier()

    at_base = p_base
    if p_base is not None:
        at_base = p_base + i_g * n * n
    for t in range(0, T, BT):
        o_t = t + tl.arange(0, BT)[:, None, None]
        m_q = (o_t < T) & m_n
        o_row = (i_b * G * n + o_n) * T + o_t
        at_wq = p_wq
        if p_wq is not None:
            at_wq = p_wq + i_b * wq_b + o_n * wq_n + o_t * wq_t
        largest = tl.full([BT, NP, 1], -float("inf"), tl.float32)
        total = tl.zeros([BT, NP, 1], tl.float32)
        for s in range(first, last, BS):
            o_s = s + tl.arange(0, BS)[None, None, :]
            at_x = p_a + i_row * row + ((o_r * T + o_t) * (splits * length) + (o_s - start))
            x = tl.load(at_x, mask=m_q, other=0.0)
            at_wk = p_wk
            if p_wk is not None:
                at_wk = p_wk + i_b * wk_b + o_n * wk_n + o_s.to(tl.int64) * wk_s
            a = mix(x, at_base, at_wq, wq_row, m_q, at_wk, wk_row, m_n & (o_s < last), n, R_Q, R_K, False)[0]
            at_mask = p_mask
            if p_mask is not None:
                at_mask = p_mask + i_b * mask_b + o_n * mask_n + o_t * mask_t + o_s.to(tl.int64) * mask_s
            visible = (o_s < last) & (o_s >= o_t + lower) & (o_s < o_t + upper) & m_q
            a = masked(a, visible, at_mask, visible)
            tl.store(at_x, a, mask=m_q)
            largest, total = united(largest, total, a, 1.0)
        at_largest = p_partial + o_row * splits + i_l
        tl.store(at_largest, largest, mask=m_q)
        tl.store(at_largest + tl.cast(splits, tl.int64) * B * G * n * T, total, mask=m_q)


@triton.jit(do_not_specialize=[
    "wq_b", "wq_t", "wq_row", "wq_n", "wk_b", "wk_s", "wk_n", "B", "T", "splits", "start", "stop", "length",
])  # fmt: skip
def weigh_values(
    p_a, p_partial, p_statistics, p_w, p_v, p_out, p_base, p_wq, p_wk,
    v_b, v_n, v_s, v_d, wq_b, wq_t, wq_row, wq_n, wk_b, wk_s, wk_row, wk_n,
    B, T, splits, start, stop, length,
    G: tl.constexpr, n: tl.constexpr, H: tl.constexpr, E: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
    NP: tl.constexpr, BT: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Of each split, Compose(softmax(a)) v to `p_out` [splits, B, N, T, E]; the weights, laid out as a, to `p_w`.

    Every program unites the statistics of all splits, BL at a time, and those of the first write them [B, N, T, 2].
    """
    i_b, i_g, i_l, first, last = split_of(splits, start, stop, length, G)
    row = tl.cast(splits, tl.int64) * length
    way = tl.cast(splits, tl.int64) * B * G * n * T
    o_n = i_g * n + tl.arange(0, NP)[None, :, None]
    m_n = o_n < i_g * n + n
    at_base = p_base
    if p_base is not None:
        at_base = p_base + i_g * n * n
    seen = 0.0
    for t in range(0, T, BT):
        o_t = t + tl.arange(0, BT)[:, None, None]
        m_q = (o_t < T) & m_n
        at_total = p_partial + way + ((i_b * G * n + o_n) * T + o_t) * splits + i_l
        seen = tl.maximum(seen, tl.max(tl.load(at_total, mask=m_q, other=0.0)))
    last = tl.where(seen > 0, last, first)  # a split that nobody sees has no scores
    for t in range(0, T, BT):
        o_t = t + tl.arange(0, BT)[:, None, None]
        m_q = (o_t < T) & m_n
        o_row = (i_b * G * n + o_n) * T + o_t
        largest = tl.full([BT, NP, 1], -float("inf"), tl.float32)
        total = tl.zeros([BT, NP, 1], tl.float32)
        for i in range(0, splits, BL):
            o_l = i + tl.arange(0, BL)[None, None, :]
            m_l = m_q & (o_l < splits)
            at_largest = p_partial + o_row * splits + o_l
            largests = tl.load(at_largest, mask=m_l, other=-float("inf"))
            largest, total = united(largest, total, largests, tl.load(at_largest + way, mask=m_l, other=0.0))
        largest = tl.where(largest == -float("inf"), 0.0, largest)
        total = tl.where(total == 0, 1.0, total)
        if i_l == 0:
            tl.store(p_statistics + 2 * o_row, largest, mask=m_q)
            tl.store(p_statistics + 2 * o_row + 1, total, mask=m_q)
        at_wq = p_wq
        if p_wq is not None:
            at_wq = p_wq + i_b * wq_b + o_n * wq_n + o_t * wq_t
        for s in range(first, last, BS):
            o_s = s + tl.arange(0, BS)[None, None, :]
            at_wk = p_wk
            if p_wk is not None:
                at_wk = p_wk + i_b * wk_b + o_n * wk_n + o_s.to(tl.int64) * wk_s
            a = tl.load(p_a + o_row * row + (o_s - start), mask=m_q, other=-float("inf"))
            p = tl.exp(a - largest) / total
            w = mix(p, at_base, at_wq, wq_row, m_q, at_wk, wk_row, m_n & (o_s < last), n, R_Q, R_K, False)[0]
            tl.store(p_w + o_row * row + (o_s - start), w.to(p_w.dtype.element_ty), mask=m_q)
    tl.debug_barrier()

    o_e, r_s = tl.arange(0, BE), tl.arange(0, BS)
    i_k0 = (i_g * n // H).to(tl.int32)
    shared = ((i_g * n + n - 1) // H).to(tl.int32) + 1 - i_k0
    tiles = tl.maximum(1, tl.cdiv(last - first, BS))  # one without keys writes zeros
    out = tl.zeros([BM, BE], tl.float32)
    for i in range(shared * tiles):
        i_k, s = i_k0 + i // tiles, first + i % tiles * BS
        o_mn, o_mt, m_m = rows_of(i_k, i_g, T, n, H, BM)
        o_mrow = (i_b * G * n + o_mn) * T + o_mt
        at_w = p_w + (o_mrow * row)[:, None] + (s - start + r_s)[None, :]
        w = tl.load(at_w, mask=m_m[:, None] & (s + r_s < last)[None, :], other=0.0)
        at_v = p_v + (i_b * v_b + tl.cast(i_k, tl.int64) * v_n + tl.cast(s, tl.int64) * v_s)
        m_v = (s + r_s < last)[:, None] & (o_e < E)[None, :]
        v = tl.load(at_v + ((r_s * v_s)[:, None] + (o_e * v_d)[None, :]), mask=m_v, other=0.0)
        out = product(w, v) + tl.where(i % tiles == 0, 0.0, out)
        if i % tiles == tiles - 1:
            at_out = p_out + (tl.cast(i_l, tl.int64) * B * G * n * T + o_mrow)[:, None] * E + o_e[None, :]
            tl.store(at_out, out, mask=m_m[:, None] & (o_e < E)[None, :])


@triton.jit(do_not_specialize=["size", "splits"])
def add_splits(p_in, p_out, size, splits, BL: tl.constexpr, BE: tl.constexpr):
    """The sum over splits of `p_in` [splits, size] to `p_out` [size], BL splits and BE elements at a time."""
    o_e = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    out = tl.zeros([BL, BE], tl.float32)
    for i in range(0, splits, BL):
        o_l = i + tl.arange(0, BL)[:, None]
        at = p_in + o_l.to(tl.int64) * size + o_e[None, :]
        out += tl.load(at, mask=(o_l < splits) & (o_e < size)[None, :], other=0.0)
    tl.store(p_out + o_e, tl.sum(out, 0).to(p_out.dtype.element_ty), mask=o_e < size)
