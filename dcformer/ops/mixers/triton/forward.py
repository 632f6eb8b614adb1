"""Forward kernels. Three launches a block: compose and mask the scores, unite the row statistics, normalise and compose.

Keys are split over programs in all of them, so that a single query (decoding) fills the device as well.

B batch, C queries of the block, S keys, N heads = G groups of n, R rank; BT, BS queries and keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcformer.ops.mixers.triton.compose import load_heads, mix, softmax, store_heads, tile, weights_at


@triton.jit(do_not_specialize=["C", "lower", "upper"])
def compose_scores(
    p_scores, p_out, p_partial, p_base, p_q, p_k, p_mask,
    q_b, q_t, k_b, k_row, k_head, mask_b, mask_n, mask_t, mask_s,
    B, C, S, G, lower, upper,
    n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """a = Compose(scores) + mask, -inf where not visible, to `p_out`; tiles without visible pairs are left as they are.

    Where `p_partial` [2, tiles of keys, B, N, C] is there: of each row the largest a in the tile and the sum of
    exp(a - largest).
    """
    i_b, i_g, i_t, i_s, o_t, o_s, some = tile(C, S, G, lower, upper, BT, BS)
    m_t, m_s = o_t < C, o_s < S
    m_x = m_t & m_s
    stride = C * S
    o_x = (i_b * G + i_g) * n * stride + o_t * S + o_s
    if p_partial is not None:
        rows = tl.arange(0, BT) + i_t * BT
        p_largest = p_partial + ((i_s * B + i_b) * G + i_g) * n * C + rows
        p_sum = p_largest + tl.cdiv(S, BS) * B * G * n * C
    if some:
        visible = m_x & (o_s >= o_t + lower) & (o_s < o_t + upper)
        xs = load_heads(p_scores + o_x, stride, m_x, n)
        at_q, at_k = weights_at(p_q, i_b, i_g * n, o_t, q_b, q_t, 1), weights_at(p_k, i_b, i_g * n, o_s, k_b, 1, k_head)
        at_base = weights_at(p_base, 0, i_g * n, 0, 0, 0, n)
        ys = mix(xs, at_base, at_q, at_k, G * n, k_row, k_head, m_t, m_s, n, R_Q, R_K, False)
        for m in tl.static_range(n):
            y = tl.where(visible, ys[m], -float("inf"))
            if p_mask is not None:
                at_mask = p_mask + i_b * mask_b + (i_g * n + m) * mask_n + o_t * mask_t + o_s * mask_s
                if p_mask.dtype.element_ty == tl.int8:
                    y = tl.where(tl.load(at_mask, mask=m_x, other=0) != 0, y, -float("inf"))
                else:
                    y += tl.load(at_mask, mask=m_x, other=0.0)
            tl.store(p_out + o_x + m * stride, y, mask=m_x)
            if p_partial is not None:
                largest = tl.max(y, 1)
                finite = tl.where(largest == -float("inf"), 0.0, largest)
                tl.store(p_largest + m * C, largest, mask=rows < C)
                tl.store(p_sum + m * C, tl.sum(tl.exp(y - finite[:, None]), 1), mask=rows < C)
    elif p_partial is not None:
        for m in tl.static_range(n):
            tl.store(p_largest + m * C, tl.full([BT], -float("inf"), tl.float32), mask=rows < C)
            tl.store(p_sum + m * C, tl.zeros([BT], tl.float32), mask=rows < C)


@triton.jit(do_not_specialize=["rows", "tiles"])
def unite_statistics(p_partial, p_statistics, rows, tiles, BLOCK: tl.constexpr):
    """Row statistics [rows, 2] from those of the tiles, [2, tiles, rows]."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    p_largest = p_partial + o_row
    p_total = p_largest + tl.cast(tiles, tl.int64) * rows
    for _ in range(tiles):
        of_tile = tl.load(p_largest, mask=m_row, other=-float("inf"))
        new = tl.maximum(largest, of_tile)
        finite = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - finite) + tl.load(p_total, mask=m_row, other=0.0) * tl.exp(of_tile - finite)
        largest = new
        p_largest += rows
        p_total += rows
    tl.store(p_statistics + 2 * o_row, tl.where(largest == -float("inf"), 0.0, largest), mask=m_row)
    tl.store(p_statistics + 2 * o_row + 1, tl.where(total == 0, 1.0, total), mask=m_row)


@triton.jit(do_not_specialize=["C", "lower", "upper"])
def compose_weights(
    p_a, p_statistics, p_base, p_q, p_k,
    q_b, q_t, k_b, k_row, k_head,
    C, S, G, lower, upper,
    n: tl.constexpr, R_Q: tl.constexpr, R_K: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compose(softmax(a)) in place of a."""
    i_b, i_g, _, _, o_t, o_s, some = tile(C, S, G, lower, upper, BT, BS)
    m_t, m_s = o_t < C, o_s < S
    m_x = m_t & m_s
    stride = C * S
    o_head = (i_b * G + i_g) * n
    p_x = p_a + o_head * stride + o_t * S + o_s
    if some:
        ps = softmax(p_x, p_statistics + 2 * (o_head * C + o_t), C, S, m_t, m_x, n)
        at_q, at_k = weights_at(p_q, i_b, i_g * n, o_t, q_b, q_t, 1), weights_at(p_k, i_b, i_g * n, o_s, k_b, 1, k_head)
        at_base = weights_at(p_base, 0, i_g * n, 0, 0, 0, n)
        store_heads(p_x, stride, m_x, mix(ps, at_base, at_q, at_k, G * n, k_row, k_head, m_t, m_s, n, R_Q, R_K, False), n)
    else:
        for m in tl.static_range(n):
            tl.store(p_x + m * stride, tl.zeros([BT, BS], tl.float32), mask=m_x)
