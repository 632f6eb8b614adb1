"""`DCMHA` against `nn.MultiheadAttention` where nothing is mixed, and against the equations where heads are."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from by_hand import ABLATIONS, EXACT, dcmha_by_hand, double, draw_mask, mix_by_hand, name, randomize
from torch import nn

from dcformer import DCMHA


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 10}, {"kdim": 12, "vdim": 6}], ids=name)
@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=name)
def test_dcmha_equals_mha_for_every_option(bias, sizes, extra):
    B, N, T, S, E = 2, 4, 5, 7, 8
    cases = itertools.product(
        [True, False],
        [None, "bool 2d", "float 2d", "bool 3d", "float 3d"],
        [None, "bool padding", "float padding"],
        [(True, True), (True, False), (False, True)],
    )
    for batch_first, attn_mask, padding, (need_weights, average) in cases:
        mha = double(nn.MultiheadAttention(E, N, bias=bias, batch_first=batch_first, **sizes, **extra))
        shapes = ((T, E), (S, mha.kdim), (S, mha.vdim))
        query, key, value = (torch.randn(*((B, n) if batch_first else (n, B)), e, dtype=torch.float64) for n, e in shapes)
        given = {
            "key_padding_mask": draw_mask(padding, B, N, T, S, torch.float64),
            "attn_mask": draw_mask(attn_mask, B, N, T, S, torch.float64),
            "need_weights": need_weights,
            "average_attn_weights": average,
        }
        case = f"{batch_first=} {attn_mask=} {padding=} {need_weights=} {average=}"
        expected, expected_weights = mha(query, key, value, **given)
        actual, weights = DCMHA.from_mha(mha)(query, key, value, **given)
        torch.testing.assert_close(actual, expected, **EXACT, msg=lambda m, case=case: f"{case}: {m}")
        assert (weights is None) == (expected_weights is None)
        if weights is not None:
            torch.testing.assert_close(weights, expected_weights, **EXACT, msg=lambda m, case=case: f"{case}: {m}")


@pytest.mark.parametrize("attn_mask", [None, "bool 2d", "float 3d"])
@pytest.mark.parametrize("padding", [None, "bool padding", "float padding"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_dcmha_equals_mha_for_a_single_sequence(attn_mask, padding):
    N, T, S, E = 4, 5, 7, 8
    mha = double(nn.MultiheadAttention(E, N, kdim=6, add_zero_attn=True, batch_first=bool(torch.rand(()) > 0.5)))
    query, key, value = (torch.randn(n, e, dtype=torch.float64) for n, e in ((T, E), (S, 6), (S, E)))
    given = {"attn_mask": draw_mask(attn_mask, 1, N, T, S, torch.float64)}
    if padding is not None:
        given["key_padding_mask"] = draw_mask(padding, 1, N, T, S, torch.float64)[0]
    module = DCMHA.from_mha(mha)
    for need_weights, average in ((True, True), (True, False), (False, True)):
        expected = mha(query, key, value, need_weights=need_weights, average_attn_weights=average, **given)
        actual = module(query, key, value, need_weights=need_weights, average_attn_weights=average, **given)
        torch.testing.assert_close(actual, expected, **EXACT)


def test_gradients_equal_those_of_mha():
    mha = double(nn.MultiheadAttention(8, 4, batch_first=True, add_bias_kv=True))
    module = DCMHA.from_mha(mha)
    inputs = [torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True) for n in (5, 7, 7)]
    mask = torch.randn(8, 5, 7, dtype=torch.float64, requires_grad=True)
    grads = []
    for m in (mha, module):
        out, _ = m(*inputs, attn_mask=mask, need_weights=False)
        out.square().sum().backward()
        grads.append([x.grad for x in (*inputs, mask)] + [m.get_parameter(key).grad for key, _ in mha.named_parameters()])
        for x in (*inputs, mask):
            x.grad = None
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected, **EXACT)


def test_is_causal():
    mha = double(nn.MultiheadAttention(8, 2, batch_first=True))
    module = DCMHA.from_mha(mha)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 3:] = True
    for need_weights in (True, False):
        for given in ({}, {"key_padding_mask": padding}):
            expected = mha(x, x, x, attn_mask=causal.isinf(), need_weights=need_weights, is_causal=True, **given)
            for mask in (causal, causal.isinf(), None):
                actual = module(x, x, x, attn_mask=mask, need_weights=need_weights, is_causal=True, **given)
                torch.testing.assert_close(actual, expected, **EXACT)
    # With fewer queries than keys they are the last of the positions; beside a mask the mask decides.
    torch.testing.assert_close(
        module(x[:, -2:], x, x, need_weights=False, is_causal=True)[0], module(x, x, x, is_causal=True)[0][:, -2:], **EXACT
    )
    upper_left = torch.ones(6, 2, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        module(x, x[:, :2], x[:, :2], need_weights=False, attn_mask=upper_left, is_causal=True)[0],
        mha(x, x[:, :2], x[:, :2], attn_mask=upper_left)[0],
        **EXACT,
    )


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_row_without_visible_keys_is_zero(need_weights):
    module = randomize(DCMHA(8, 2, batch_first=True, bias=False))
    x = torch.randn(3, 5, 8, requires_grad=True)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1] = True
    out, weights = module(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    assert not out[1].any() and out[0].all() and out[2].all()
    assert weights is None or not weights[1].any()
    out.sum().backward()
    assert x.grad.isfinite().all() and not x.grad[1].any()
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


def test_masked_keys_leave_no_trace():
    """Neither as keys and values nor through their key-wise weights."""
    module = randomize(DCMHA(16, 4, batch_first=True))
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 4:] = True
    garbage = x.clone()
    garbage[:, 4:] = 1e4
    short = module(x[:, :4], x[:, :4], x[:, :4], need_weights=False)[0]
    for states in (x, garbage):
        out = module(states, states, states, key_padding_mask=padding, need_weights=False)[0]
        torch.testing.assert_close(out[:, :4], short, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", ABLATIONS, ids=name)
def test_dcmha_composes_as_the_equations_say(options):
    module = double(DCMHA(16, 4, batch_first=True, **options))
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected, expected_weights = dcmha_by_hand(module, x, x, x, ~hidden)
    out, weights = module(x, x, x, attn_mask=hidden, average_attn_weights=False)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(weights, expected_weights, **EXACT)
    torch.testing.assert_close(module(x, x, x, is_causal=True, need_weights=False)[0], expected, **EXACT)


@pytest.mark.parametrize("options", [{}, {"groups": 2, "static": True}, {"num_kv_heads": 2}, {"num_kv_heads": 1}], ids=name)
@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 6}, {"vdim": 6}], ids=name)
def test_dcmha_cross_attention(options, sizes):
    module = double(DCMHA(16, 4, batch_first=True, **sizes, **options))
    query, key, value = (torch.randn(2, n, e, dtype=torch.float64) for n, e in ((5, 16), (9, module.kdim), (9, module.vdim)))
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = True
    expected, expected_weights = dcmha_by_hand(module, query, key, value, ~padding[:, None, None])
    out, weights = module(query, key, value, key_padding_mask=padding, average_attn_weights=False)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(weights, expected_weights, **EXACT)
    for backend in ("reference", "chunked"):
        module.backend = backend
        out, weights = module(query, key, value, key_padding_mask=padding, need_weights=False)
        torch.testing.assert_close(out, expected, **EXACT)
        assert weights is None


def test_window():
    T, W = 9, 3
    module = double(DCMHA(8, 2, batch_first=True, window=W))
    x = torch.randn(2, T, 8, dtype=torch.float64)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    for is_causal, visible in ((False, distance.abs() < W), (True, (distance >= 0) & (distance < W))):
        expected, _ = dcmha_by_hand(module, x, x, x, visible)
        for need_weights in (True, False):
            out, _ = module(x, x, x, is_causal=is_causal, need_weights=need_weights)
            torch.testing.assert_close(out, expected, **EXACT)


@pytest.mark.parametrize("style", [None, "bool 2d", "float 3d"])
def test_added_keys_are_visible_and_mix_query_wise_only(style):
    """`add_bias_kv` and `add_zero_attn` with composition, causality and a window, against longer inputs by hand."""
    B, N, T, E, W = 2, 2, 6, 8, 3
    module = double(DCMHA(E, N, batch_first=True, window=W, add_bias_kv=True, add_zero_attn=True))
    x = torch.randn(B, T, E, dtype=torch.float64)
    mask = draw_mask(style, B, N, T, T, torch.float64)
    weights = module(x, x, x, attn_mask=mask, is_causal=True, average_attn_weights=False)[1]
    out = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]

    q, k, v = (s.unflatten(2, (N, -1)).transpose(1, 2) for s in (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, 2))
    bias_k, bias_v = (b.view(1, N, 1, -1).expand(B, -1, -1, -1) for b in (module.bias_k, module.bias_v))
    k, v = torch.cat([k, bias_k, 0 * bias_k], 2), torch.cat([v, bias_v, 0 * bias_v], 2)

    def mix(side, scores):
        given = mix_by_hand(module.compose, side, scores[..., :T], x, x)
        without_keys = copy.deepcopy(module.compose)
        for c in (1, 3):  # the key-wise channels: w2 and gates to zero
            with torch.no_grad():
                without_keys.dynamic.qkw[:, c, :, module.compose.rank :] = 0
                without_keys.dynamic.dd[:, :, c * N : (c + 1) * N] = 0
        return torch.cat([given, mix_by_hand(without_keys, side, scores[..., T:], x, x[:, :2])], -1)

    distance = torch.arange(T)[:, None] - torch.arange(T)
    added = torch.zeros(T, T, dtype=torch.float64).masked_fill((distance < 0) | (distance >= W), -math.inf)
    if mask is not None:
        added = added + (added.new_zeros(mask.shape).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask).view(
            -1, 1 if mask.dim() == 2 else N, T, T
        )
    scores = mix("pre", q @ k.transpose(2, 3) / math.sqrt(E // N)) + F.pad(added, (0, 2))
    expected_weights = mix("post", scores.softmax(-1))
    torch.testing.assert_close(weights, expected_weights, **EXACT)
    torch.testing.assert_close(out, module.out_proj((expected_weights @ v).transpose(1, 2).flatten(2)), **EXACT)


def test_qk_norm():
    module = double(DCMHA(8, 2, batch_first=True, qk_norm=True))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    q, k, v = (s.unflatten(2, (2, 4)).transpose(1, 2) for s in (x @ module.in_proj_weight.T + module.in_proj_bias).chunk(3, 2))
    q, k = (
        s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        for s, norm in ((q, module.q_norm), (k, module.k_norm))
    )
    scores = mix_by_hand(module.compose, "pre", q @ k.transpose(2, 3) / 2, x, x)
    weights = mix_by_hand(module.compose, "post", scores.softmax(-1), x, x)
    expected = module.out_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], expected, **EXACT)


def test_layouts_agree():
    module = double(DCMHA(8, 2, batch_first=True))
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    expected, expected_weights = module(x, x, x)
    single, single_weights = module(x[1], x[1], x[1])
    torch.testing.assert_close((single, single_weights), (expected[1], expected_weights[1]), **EXACT)
    module.batch_first = False
    y = x.transpose(0, 1)
    out, weights = module(y, y, y)
    torch.testing.assert_close((out.transpose(0, 1), weights), (expected, expected_weights), **EXACT)
