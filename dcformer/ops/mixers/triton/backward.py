"""Backward kernels, two launches a block, one for each composition against the stream; between them each row's sum of p dp.

A program makes p again from the scores and the row statistics. It owns its tile of keys for its chunk of queries: gradients of
key-wise weights are summed in registers and written once a chunk, those of query-wise weights once a tile of keys, and both
are added up by the launcher. No atomics: the same bits every time.

B batch, C queries of the block, S keys, N heads = G groups of n, R rank; tiles as in compose.py, rows as in forward.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcformer.ops.mixers.triton.compose import (
    added,
    clear,
    masked,
    mix,
    over_keys,
    place,
    store_rows,
    weight_grads,
    zeros,
)


@triton.jit(do_not_specialize=["B", "C", "S", "lower", "upper"])
def backward_of_post(
    p_x, p_statistics, p_dw, p_w, p_delta, p_mask,
    p_pre_base, p_pre_q, p_pre_k, p_base, p_q, p_k, p_dbase, p_dq, p_dk,
    pre_q_b, pre_q_t, pre_k_b, pre_k_row, pre_k_head, q_b, q_t, k_b, k_row, k_head,
    mask_b, mask_n, mask_t, mask_s,
    B, C, S, row, lower, upper,
    G: tl.constexpr, n: tl.constexpr, PRE_R_Q: tl.constexpr, PRE_R_K: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
    NP: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """From scores and the gradient of the weights: the weights to `p_w`, the gradient of p in place of `p_dw`.

    Partial sums, zeros before: `p_delta` [tiles of keys, B, N, C] of p dp along keys, `p_dq` [tiles, B, C, 2R+1, N],
    `p_dk` [chunks, B, 2R+1, N, S], `p_dbase` [tiles, chunks, B, G, n, n].
    """
    i_b, i_g, i_c, i_s, first, last, some = place(C, S, lower, upper, G, CHUNK, BS)
    heads = tl.arange(0, NP)[None, :, None]
    o_n = i_g * n + heads
    o_s = i_s * BS + tl.arange(0, BS)[None, None, :]
    m_n = heads < n
    m_k = m_n & (o_s < row)
    if some:
        at_pre_k = p_pre_k
        if p_pre_k is not None:
            at_pre_k = p_pre_k + (i_b * pre_k_b + i_g * n * pre_k_head) + (heads * pre_k_head + o_s)
        at_pre_base = p_pre_base
        if p_pre_base is not None:
            at_pre_base = p_pre_base + i_g * n * n
        at_k = p_k
        if p_k is not None:
            at_k = p_k + (i_b * k_b + i_g * n * k_head) + (heads * k_head + o_s)
            dk = zeros(2 * R_K + 1, NP, BS)
        at_base = p_base
        if p_base is not None:
            at_base = p_base + i_g * n * n
            dbase = tl.zeros([BT, NP, NP], tl.float32)
        for t in range(first, last, BT):
            o_t = t + tl.arange(0, BT)[:, None, None]
            m_q = (o_t < last) & m_n
            m_x = m_q & m_k
            at_pre_q = p_pre_q
            if p_pre_q is not None:
                at_pre_q = p_pre_q + (i_b * pre_q_b + i_g * n) + (o_t * pre_q_t + heads)
            at_mask = p_mask
            if p_mask is not None:
                at_mask = p_mask + i_b * mask_b + o_n * mask_n + o_t * mask_t + o_s * mask_s
            o_row = (i_b * G * n + o_n) * C + o_t
            x = tl.load(p_x + o_row * row + o_s, mask=m_x, other=0.0)
            a = mix(x, at_pre_base, at_pre_q, G * n, m_q, at_pre_k, pre_k_row, m_k, n, PRE_R_Q, PRE_R_K, False)[0]
            visible = (o_s < S) & (o_s >= o_t + lower) & (o_s < o_t + upper) & m_q
            a = masked(a, visible, at_mask, m_q & (o_s < S))
            largest = tl.load(p_statistics + 2 * o_row, mask=m_q, other=0.0)
            total = tl.load(p_statistics + 2 * o_row + 1, mask=m_q, other=1.0)
            p = tl.exp(a - largest) / total
            at_q = p_q
            if p_q is not None:
                at_q = p_q + (i_b * q_b + i_g * n) + (o_t * q_t + heads)
            w, hq, hk = mix(p, at_base, at_q, G * n, m_q, at_k, k_row, m_k, n, R_Q, R_K, False)
            tl.store(p_w + o_row * row + o_s, w.to(p_w.dtype.element_ty), mask=m_x)
            at_dw = p_dw + o_row * row + o_s
            dw = tl.where(o_s < S, tl.load(at_dw, mask=m_x, other=0.0), 0.0)
            dp, dhq, dhk = mix(dw, at_base, at_q, G * n, m_q, at_k, k_row, m_k, n, R_Q, R_K, True)
            tl.store(at_dw, dp, mask=m_x)
            delta = tl.sum(p * dp, 2, keep_dims=True)
            tl.store(p_delta + tl.cast(i_s, tl.int64) * B * G * n * C + o_row, delta, mask=m_q)
            if p_dq is not None:
                at_dq = p_dq + ((i_s * B + i_b) * C + o_t) * ((2 * R_Q + 1) * G * n) + o_n
                store_rows(at_dq, G * n, m_q, weight_grads(p, dw, hq, dhq, 2, R_Q), 2 * R_Q + 1)
            if p_dk is not None:
                dk = added(dk, weight_grads(p, dw, hk, dhk, 0, R_K), 2 * R_K + 1)
            if p_dbase is not None:
                dbase += over_keys(p, dw)
        if p_dk is not None:
            at_dk = p_dk + ((i_c * B + i_b) * (2 * R_K + 1) * G * n + o_n) * S + o_s
            store_rows(at_dk, tl.cast(S, tl.int64) * (G * n), m_n & (o_s < S), dk, 2 * R_K + 1)
        if p_dbase is not None:
            of, into = tl.arange(0, NP)[:, None], tl.arange(0, NP)[None, :]
            at_dbase = p_dbase + (((i_s * tl.cdiv(C, CHUNK) + i_c) * B + i_b) * G + i_g) * n * n + of * n + into
            tl.store(at_dbase, tl.sum(dbase, 0), mask=(of < n) & (into < n))
    else:
        clear(p_w + i_b * G * n * C * row + o_s, row, o_n * C * row, m_k, first, last, BT)


@triton.jit(do_not_specialize=["B", "C", "S", "lower", "upper"])
def backward_of_pre(
    p_x, p_statistics, p_dp, p_delta, p_dx, p_da, p_mask,
    p_base, p_q, p_k, p_dbase, p_dq, p_dk,
    q_b, q_t, k_b, k_row, k_head, mask_b, mask_n, mask_t, mask_s,
    B, C, S, row, lower, upper,
    G: tl.constexpr, n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
    NP: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """From scores, the gradient of p and `p_delta` [B, N, C], its sum with p over keys: the gradient of the scores to `p_dx`.

    That of the mask, unreduced, to `p_da` where it is there. Partial sums as in `backward_of_post`.
    """
    i_b, i_g, i_c, i_s, first, last, some = place(C, S, lower, upper, G, CHUNK, BS)
    heads = tl.arange(0, NP)[None, :, None]
    o_n = i_g * n + heads
    o_s = i_s * BS + tl.arange(0, BS)[None, None, :]
    m_n = heads < n
    m_k = m_n & (o_s < row)
    if some:
        at_k = p_k
        if p_k is not None:
            at_k = p_k + (i_b * k_b + i_g * n * k_head) + (heads * k_head + o_s)
            dk = zeros(2 * R_K + 1, NP, BS)
        at_base = p_base
        if p_base is not None:
            at_base = p_base + i_g * n * n
            dbase = tl.zeros([BT, NP, NP], tl.float32)
        for t in range(first, last, BT):
            o_t = t + tl.arange(0, BT)[:, None, None]
            m_q = (o_t < last) & m_n
            m_x = m_q & m_k
            at_q = p_q
            if p_q is not None:
                at_q = p_q + (i_b * q_b + i_g * n) + (o_t * q_t + heads)
            at_mask = p_mask
            if p_mask is not None:
                at_mask = p_mask + i_b * mask_b + o_n * mask_n + o_t * mask_t + o_s * mask_s
            o_row = (i_b * G * n + o_n) * C + o_t
            at_x = o_row * row + o_s
            x = tl.where(o_s < S, tl.load(p_x + at_x, mask=m_x, other=0.0), 0.0)
            a, hq, hk = mix(x, at_base, at_q, G * n, m_q, at_k, k_row, m_k, n, R_Q, R_K, False)
            visible = (o_s < S) & (o_s >= o_t + lower) & (o_s < o_t + upper) & m_q
            a = masked(a, visible, at_mask, m_q & (o_s < S))
            largest = tl.load(p_statistics + 2 * o_row, mask=m_q, other=0.0)
            total = tl.load(p_statistics + 2 * o_row + 1, mask=m_q, other=1.0)
            p = tl.exp(a - largest) / total
            dp = tl.where(o_s < S, tl.load(p_dp + at_x, mask=m_x, other=0.0), 0.0)
            da = p * (dp - tl.load(p_delta + o_row, mask=m_q, other=0.0))
            if p_da is not None:
                tl.store(p_da + at_x, da, mask=m_x)
            dx, dhq, dhk = mix(da, at_base, at_q, G * n, m_q, at_k, k_row, m_k, n, R_Q, R_K, True)
            tl.store(p_dx + at_x, dx.to(p_dx.dtype.element_ty), mask=m_x)
            if p_dq is not None:
                at_dq = p_dq + ((i_s * B + i_b) * C + o_t) * ((2 * R_Q + 1) * G * n) + o_n
                store_rows(at_dq, G * n, m_q, weight_grads(x, da, hq, dhq, 2, R_Q), 2 * R_Q + 1)
            if p_dk is not None:
                dk = added(dk, weight_grads(x, da, hk, dhk, 0, R_K), 2 * R_K + 1)
            if p_dbase is not None:
                dbase += over_keys(x, da)
        if p_dk is not None:
            at_dk = p_dk + ((i_c * B + i_b) * (2 * R_K + 1) * G * n + o_n) * S + o_s
            store_rows(at_dk, tl.cast(S, tl.int64) * (G * n), m_n & (o_s < S), dk, 2 * R_K + 1)
        if p_dbase is not None:
            of, into = tl.arange(0, NP)[:, None], tl.arange(0, NP)[None, :]
            at_dbase = p_dbase + (((i_s * tl.cdiv(C, CHUNK) + i_c) * B + i_b) * G + i_g) * n * n + of * n + into
            tl.store(at_dbase, tl.sum(dbase, 0), mask=(of < n) & (into < n))
    else:
        clear(p_dx + i_b * G * n * C * row + o_s, row, o_n * C * row, m_k, first, last, BT)
        if p_da is not None:
            clear(p_da + i_b * G * n * C * row + o_s, row, o_n * C * row, m_k, first, last, BT)
