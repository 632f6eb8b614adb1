"""Forward kernels. Three launches a block: compose and mask the scores, unite the row statistics, normalise and compose.

Keys are split over programs in all of them, so that a single query (decoding) fills the device as well.

B batch, C queries of the block, S keys, N heads = G groups of n, R rank; tiles as in compose.py. Scores have rows `row` apart,
a multiple of 16 and at least S, so that loads are as wide as they can be; what lies behind S is never used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcformer.ops.mixers.triton.compose import clear, masked, mix, place


@triton.jit(do_not_specialize=["B", "C", "S", "lower", "upper"])
def compose_scores(
    p_x, p_partial, p_base, p_q, p_k, p_mask,
    q_b, q_t, k_b, k_row, k_head, mask_b, mask_n, mask_t, mask_s,
    B, C, S, row, lower, upper,
    G: tl.constexpr, n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
    NP: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """a = Compose(scores) + mask in place, -inf where not visible; programs without visible pairs leave it as it is.

    `p_partial` [2, tiles of keys, B, N, C], zeros before: of each row the largest a in the tile and the sum of
    exp(a - largest).
    """
    i_b, i_g, _, i_s, first, last, some = place(C, S, lower, upper, G, CHUNK, BS)
    if some:
        heads = tl.arange(0, NP)[None, :, None]
        o_n = i_g * n + heads
        o_s = i_s * BS + tl.arange(0, BS)[None, None, :]
        m_n = heads < n
        m_k = m_n & (o_s < row)
        at_k = p_k
        if p_k is not None:
            at_k = p_k + (i_b * k_b + i_g * n * k_head) + (heads * k_head + o_s)
        at_base = p_base
        if p_base is not None:
            at_base = p_base + i_g * n * n
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
            at_x = p_x + o_row * row + o_s
            x = tl.load(at_x, mask=m_x, other=0.0)
            a = mix(x, at_base, at_q, G * n, m_q, at_k, k_row, m_k, n, R_Q, R_K, False)[0]
            visible = (o_s < S) & (o_s >= o_t + lower) & (o_s < o_t + upper)
            a = masked(a, visible, at_mask, m_q & (o_s < S))
            tl.store(at_x, a, mask=m_x)
            largest = tl.max(a, 2, keep_dims=True)
            total = tl.sum(tl.exp(a - tl.where(largest == -float("inf"), 0.0, largest)), 2, keep_dims=True)
            at_largest = p_partial + tl.cast(i_s, tl.int64) * B * G * n * C + o_row
            tl.store(at_largest, largest, mask=m_q)
            tl.store(at_largest + tl.cdiv(S, BS).to(tl.int64) * B * G * n * C, total, mask=m_q)


@triton.jit(do_not_specialize=["rows", "tiles"])
def unite_statistics(p_partial, p_statistics, rows, tiles, BR: tl.constexpr, BL: tl.constexpr):
    """Row statistics [rows, 2] from those of the tiles, [2, tiles, rows]; BL tiles of BR rows at a time."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    largest = tl.full([BR], -float("inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    for i in range(0, tiles, BL):
        o_l = i + tl.arange(0, BL)[:, None]
        m = (o_r[None, :] < rows) & (o_l < tiles)
        at = p_partial + o_l.to(tl.int64) * rows + o_r[None, :]
        sums_ = tl.load(at + tl.cast(tiles, tl.int64) * rows, mask=m, other=0.0)
        # A tile that sees nothing was not written, or has the largest score -inf and the sum 0.
        largests = tl.where(sums_ > 0, tl.load(at, mask=m, other=0.0), -float("inf"))
        new = tl.maximum(largest, tl.max(largests, 0))
        finite = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - finite) + tl.sum(sums_ * tl.exp(largests - finite[None, :]), 0)
        largest = new
    at = p_statistics + 2 * o_r
    tl.store(at, tl.where(largest == -float("inf"), 0.0, largest), mask=o_r < rows)
    tl.store(at + 1, tl.where(total == 0, 1.0, total), mask=o_r < rows)


@triton.jit(do_not_specialize=["C", "S", "lower", "upper"])
def compose_weights(
    p_a, p_statistics, p_out, p_base, p_q, p_k,
    q_b, q_t, k_b, k_row, k_head,
    C, S, row, lower, upper,
    G: tl.constexpr, n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr,
    NP: tl.constexpr, CHUNK: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compose(softmax(a)) to `p_out`, in its dtype."""
    i_b, i_g, _, i_s, first, last, some = place(C, S, lower, upper, G, CHUNK, BS)
    heads = tl.arange(0, NP)[None, :, None]
    o_n = i_g * n + heads
    o_s = i_s * BS + tl.arange(0, BS)[None, None, :]
    m_n = heads < n
    m_k = m_n & (o_s < row)
    if some:
        at_k = p_k
        if p_k is not None:
            at_k = p_k + (i_b * k_b + i_g * n * k_head) + (heads * k_head + o_s)
        at_base = p_base
        if p_base is not None:
            at_base = p_base + i_g * n * n
        for t in range(first, last, BT):
            o_t = t + tl.arange(0, BT)[:, None, None]
            m_q = (o_t < last) & m_n
            m_x = m_q & m_k
            at_q = p_q
            if p_q is not None:
                at_q = p_q + (i_b * q_b + i_g * n) + (o_t * q_t + heads)
            o_row = (i_b * G * n + o_n) * C + o_t
            a = tl.load(p_a + o_row * row + o_s, mask=m_x, other=-float("inf"))
            largest = tl.load(p_statistics + 2 * o_row, mask=m_q, other=0.0)
            total = tl.load(p_statistics + 2 * o_row + 1, mask=m_q, other=1.0)
            p = tl.exp(a - largest) / total
            w = mix(p, at_base, at_q, G * n, m_q, at_k, k_row, m_k, n, R_Q, R_K, False)[0]
            tl.store(p_out + o_row * row + o_s, w.to(p_out.dtype.element_ty), mask=m_x)
    else:
        clear(p_out + i_b * G * n * C * row + o_s, row, o_n * C * row, m_k, first, last, BT)
