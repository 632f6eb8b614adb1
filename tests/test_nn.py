"""Compose against its equations, DCMHA against `nn.MultiheadAttention` and against a hand-written composition."""

import copy
import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from dcformer import DCMHA, Compose

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


# --------------------------------------------------------------------------------------------------- by hand, from the paper


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


# ------------------------------------------------------------------------------------------------------------------- Compose


@pytest.mark.parametrize("options", ABLATIONS, ids=name)
def test_compose_makes_what_the_options_say(options):
    E, N, T = 12, 8, 5
    compose = double(Compose(E, N, **options))
    hidden = torch.randn(2, T, E, dtype=torch.float64)
    R, G, n = compose.rank, compose.groups, N // compose.groups
    for side, composition in zip(("pre", "post"), compose(hidden), strict=True):
        on = options.get(side, True)
        assert composition.groups == G
        assert (composition.base is not None) == (on and options.get("static", False))
        if composition.base is not None:
            assert composition.base.shape == (G, n, n)
        for part, weights in (("query", composition.query), ("key", composition.key)):
            made = weights_by_hand(compose, side, part, hidden)
            assert (weights is not None) == (on and options.get(f"{part}_wise", True) and (R > 0 or compose.gates))
            if weights is not None:
                w1, w2, gate = made
                torch.testing.assert_close(weights, torch.cat([w1, w2, gate[:, :, None]], dim=2), **EXACT)


@pytest.mark.parametrize("options", ABLATIONS, ids=name)
def test_compose_has_the_parameters_of_its_options_and_no_other(options):
    E, N = 12, 8
    compose = Compose(E, N, **options)
    R, G = compose.rank, compose.groups
    n = N // G
    C = len(compose.sides) * (options.get("query_wise", True) + options.get("key_wise", True))
    inner = 2 * R * n
    expected = G * C * (E * inner + inner * 2 * R * n + (E * n if options.get("gates", True) else 0))
    if options.get("static", False):
        expected += len(compose.sides) * G * n * n
    assert sum(p.numel() for p in compose.parameters()) == expected
    assert compose.state_dict().keys() <= {"pre_base", "post_base", "dynamic.dw1", "dynamic.qkw", "dynamic.dd"}


def test_compose_with_two_streams_equals_one_stream_where_they_are_the_same():
    compose = double(Compose(12, 4))
    hidden = torch.randn(2, 5, 12, dtype=torch.float64)
    for one, two in zip(compose(hidden), compose(hidden, hidden.clone()), strict=True):
        torch.testing.assert_close(one.query, two.query, **EXACT)
        torch.testing.assert_close(one.key, two.key, **EXACT)


@pytest.mark.parametrize("key_size", [12, 7])
@pytest.mark.parametrize("options", [{}, {"query_wise": False}, {"key_wise": False}, {"pre": False, "groups": 2}], ids=name)
def test_compose_for_cross_attention(key_size, options):
    compose = double(Compose(12, 4, key_embed_dim=key_size, **options))
    hidden, memory = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 9, key_size, dtype=torch.float64)
    for side, composition in zip(("pre", "post"), compose(hidden, memory), strict=True):
        for part, states, weights in (("query", hidden, composition.query), ("key", memory, composition.key)):
            made = weights_by_hand(compose, side, part, states)
            assert (made is None) == (weights is None)
            if made is not None:
                torch.testing.assert_close(weights, torch.cat([*made[:2], made[2][:, :, None]], dim=2), **EXACT)
    parameters = list(compose.parameters())
    assert parameters and all(parameter.shape[0] in (12, key_size, compose.groups) for parameter in parameters)


def test_compose_initialisation_has_the_papers_deviations():
    E, N, R, G = 96, 24, 2, 2
    n, inner = N // G, 2 * R * (N // G)
    compose = Compose(E, N, groups=G, static=True, gate_std=0.05)
    expected = {
        "dynamic.dw1": math.sqrt(2 / (E + inner)),
        "dynamic.qkw": 0.01 * 2 / (n + R) * math.sqrt(1 / inner),
        "dynamic.dd": 0.05 * math.sqrt(2 / (E + n)),
        "pre_base": 0.1 / math.sqrt(n),
        "post_base": 0.1 / math.sqrt(n),
    }
    parameters = dict(compose.named_parameters())
    assert parameters.keys() == expected.keys()
    for key, std in expected.items():
        values = parameters[key].detach().double()
        sigma = std / math.sqrt(2 * values.numel())  # of the estimated deviation
        assert abs(values.square().mean().sqrt() - std) < 6 * sigma, f"{key}: {values.square().mean().sqrt()} and not {std}"
        assert abs(values.mean()) < 6 * std / math.sqrt(values.numel()), key
    default = Compose(E, N).dynamic.dd
    ratio = default.detach().double().square().mean().sqrt() / (0.005 * math.sqrt(2 / (E + N)))
    assert abs(ratio - 1) < 6 / math.sqrt(2 * default.numel())


@pytest.mark.parametrize("options", ABLATIONS, ids=name)
def test_every_parameter_of_compose_learns_from_the_second_step(options):
    """At the first step only `dw1` waits: it stands behind w2, which is zero."""
    mha = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    module = DCMHA.from_mha(mha, **options)
    x, target = torch.randn(2, 2, 7, 16, dtype=torch.float64)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in (1, 2):
        optimizer.zero_grad()
        (module(x, x, x, need_weights=False)[0] - target).square().mean().backward()
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key
            assert bool(parameter.grad.any()) == (step == 2 or not key.endswith("dw1")), f"{key} at step {step}"
            if step == 1 and key.endswith("qkw"):
                R = module.compose.rank
                assert not parameter.grad[..., :R, :].any() and parameter.grad[..., R:, :].any()
        optimizer.step()


# ------------------------------------------------------------------------------------ DCMHA against nn.MultiheadAttention


def masks(kind, B, N, T, S, dtype):
    """A mask of `nn.MultiheadAttention` that leaves the first key visible to everybody."""
    if kind is None:
        return None
    style, dims = kind.split()
    hidden = torch.rand({"2d": (T, S), "3d": (B * N, T, S), "padding": (B, S)}[dims]) > 0.6
    hidden[..., 0] = False
    if style == "bool":
        return hidden
    return torch.randn(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)


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
            "key_padding_mask": masks(padding, B, N, T, S, torch.float64),
            "attn_mask": masks(attn_mask, B, N, T, S, torch.float64),
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
    given = {"attn_mask": masks(attn_mask, 1, N, T, S, torch.float64)}
    if padding is not None:
        given["key_padding_mask"] = masks(padding, 1, N, T, S, torch.float64)[0]
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


# -------------------------------------------------------------------------------------- DCMHA against the equations


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
    mask = masks(style, B, N, T, T, torch.float64)
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


# ------------------------------------------------------------------------------------------- inside torch's own layers


def encoder_layer(batch_first=True, **options):
    settings = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64, **options}
    return double(nn.TransformerEncoderLayer(16, 4, **settings))


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of `DCMHA.forward`; hooks would not do, since torch's fast path is off where there are any."""
    counter, forward = [], DCMHA.forward

    def counting(self, *args, **kwargs):
        counter.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(DCMHA, "forward", counting)
    return counter


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer(calls, batch_first, norm_first):
    layer = encoder_layer(batch_first, norm_first=norm_first, activation="gelu")
    plain = copy.deepcopy(layer)
    layer.self_attn = DCMHA.from_mha(layer.self_attn)
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    padding = torch.zeros(x.shape[:2] if batch_first else x.shape[1::-1], dtype=torch.bool)
    padding[:, -1:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1] if batch_first else 3, dtype=torch.float64)
    givens = ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "is_causal": True}, {"src_mask": causal.isinf()})
    for training, grad in ((True, True), (False, True), (False, False)):
        for given in givens:
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(layer.train(training)(x, **given), plain.train(training)(x, **given), **EXACT)
    assert len(calls) == 12
    # With trained composition, evaluation is what training is: torch's fused plain attention is never taken.
    double(layer.self_attn.compose)
    expected = layer.train()(x)
    assert not torch.allclose(expected, plain(x), atol=1e-2)
    with torch.inference_mode():
        torch.testing.assert_close(layer.eval()(x), expected, **EXACT)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced after", "built with"])
def test_encoder_stack_with_padding(calls, replaced):
    """Where the layers are replaced after the stack was built, it hands nested tensors to them in evaluation."""
    layer = encoder_layer()
    plain = double(nn.TransformerEncoder(layer, 2))
    if replaced:
        stack = copy.deepcopy(plain)
        for block in stack.layers:
            block.self_attn = DCMHA.from_mha(block.self_attn)
    else:
        layer.self_attn = DCMHA.from_mha(layer.self_attn)
        stack = nn.TransformerEncoder(layer, 2)
        for block, original in zip(stack.layers, plain.layers, strict=True):
            block.load_state_dict({**block.state_dict(), **original.state_dict()})
    assert stack.use_nested_tensor == replaced
    x, lengths = torch.randn(3, 6, 16, dtype=torch.float64), torch.tensor([6, 2, 4])
    padding = torch.arange(6) >= lengths[:, None]
    for training in (True, False):
        with torch.set_grad_enabled(training):
            out, expected = (m.train(training)(x, src_key_padding_mask=padding) for m in (stack, plain))
        torch.testing.assert_close(out[~padding], expected[~padding], **EXACT)
    assert len(calls) >= 4
    for block in stack.layers:
        double(block.self_attn.compose)
    with torch.no_grad():
        together = stack.eval()(x, src_key_padding_mask=padding)
        for i, length in enumerate(lengths):
            torch.testing.assert_close(together[i, :length], stack(x[i : i + 1, :length])[0], **EXACT)
    torch.testing.assert_close(stack.train()(x, src_key_padding_mask=padding)[~padding], together[~padding], **EXACT)


@pytest.mark.parametrize("batch_first", [True, False])
def test_decoder_layer(batch_first):
    settings = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": batch_first, "dtype": torch.float64}
    layer = double(nn.TransformerDecoderLayer(16, 4, **settings))
    plain = copy.deepcopy(layer)
    layer.self_attn, layer.multihead_attn = DCMHA.from_mha(layer.self_attn), DCMHA.from_mha(layer.multihead_attn)
    B, T, S = 3, 5, 8
    target, memory = (torch.randn(*((B, n) if batch_first else (n, B)), 16, dtype=torch.float64) for n in (T, S))
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[0, 5:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    given = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    for training in (True, False):
        with torch.set_grad_enabled(training):
            out, expected = (m.train(training)(target, memory, **given) for m in (layer, plain))
        torch.testing.assert_close(out, expected, **EXACT)
    double(layer.multihead_attn.compose)
    moved = memory.clone()
    (moved[0] if batch_first else moved[:, 0])[5:] = 100.0  # padding of the first row
    torch.testing.assert_close(layer(target, moved, **given), layer(target, memory, **given), **EXACT)


def test_whole_transformer_trains():
    model = nn.Transformer(16, 4, 1, 1, 24, dropout=0.1, batch_first=True)
    for block in [*model.encoder.layers, *model.decoder.layers]:
        block.self_attn = DCMHA.from_mha(block.self_attn)
    model.decoder.layers[0].multihead_attn = DCMHA.from_mha(model.decoder.layers[0].multihead_attn, static=True)
    source, target = torch.randn(4, 7, 16), torch.randn(4, 5, 16)
    causal = model.generate_square_subsequent_mask(5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(model(source, target, tgt_mask=causal, tgt_is_causal=True), source[:, :5].cumsum(1) / 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_nested_tensors():
    module = double(DCMHA(16, 4, batch_first=True))
    sequences = [torch.randn(n, 16, dtype=torch.float64) for n in (5, 1, 3)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(sequences, layout=layout)
        out, weights = module(nested, nested, nested, need_weights=False, is_causal=True)
        assert weights is None and out.is_nested and out.layout == layout
        for sequence, row in zip(sequences, out.unbind(), strict=True):
            torch.testing.assert_close(row, module(sequence, sequence, sequence, is_causal=True)[0], **EXACT)
    with pytest.raises(ValueError, match="nested"):
        module(nested, nested, nested)
    with pytest.raises(ValueError, match="nested"):
        module(nested, sequences[0], sequences[0], need_weights=False)
    module.batch_first = False
    with pytest.raises(ValueError, match="batch_first=True"):
        module(nested, nested, nested, need_weights=False)


# ----------------------------------------------------------------------------------------- taking over, saving, copying


@pytest.mark.parametrize("sizes", [{}, {"kdim": 10, "vdim": 6}], ids=name)
def test_from_mha_takes_over_everything(sizes):
    mha = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True, dtype=torch.bfloat16, add_bias_kv=True, **sizes).eval()
    mha.out_proj.weight.requires_grad_(False)
    module = DCMHA.from_mha(mha, groups=2, rank=1, backend="chunked")
    assert module.dropout == 0.25 and module.batch_first and not module.training and module.backend == "chunked"
    assert module.compose.groups == 2 and module.compose.rank == 1 and not module.compose.training
    for key, original in mha.named_parameters():
        taken = module.get_parameter(key)
        assert torch.equal(taken, original) and taken.data_ptr() != original.data_ptr()
        assert taken.requires_grad == original.requires_grad
    assert all(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.compose.parameters())
    assert DCMHA.from_mha(nn.MultiheadAttention(8, 2, device="meta")).in_proj_weight.is_meta
    for option in ({"window": 3}, {"qk_norm": True}, {"num_kv_heads": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(option))}=.* would change the outputs"):
            DCMHA.from_mha(mha, **option)


def test_mha_checkpoints_load_and_a_seed_draws_the_same_projections():
    torch.manual_seed(5)
    mha = nn.MultiheadAttention(8, 2)
    torch.manual_seed(5)
    module = DCMHA(8, 2)
    for key, original in mha.state_dict().items():
        assert torch.equal(module.state_dict()[key], original)
    report = DCMHA(8, 2).load_state_dict(mha.state_dict(), strict=False)
    assert not report.unexpected_keys and all(key.startswith("compose.") for key in report.missing_keys)


def test_state_dict_and_deepcopy():
    options = {"kdim": 10, "static": True, "qk_norm": True, "num_kv_heads": 2, "add_bias_kv": True, "batch_first": True}
    module, other = randomize(DCMHA(16, 4, **options)), DCMHA(16, 4, **options)
    query, key, value = torch.randn(2, 5, 16), torch.randn(2, 6, 10), torch.randn(2, 6, 16)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    expected = module(query, key, value)
    for twin in (other, copy.deepcopy(module)):
        torch.testing.assert_close(twin(query, key, value), expected, rtol=0, atol=0)
    with torch.no_grad():
        copied = copy.deepcopy(module)
        copied.compose.dynamic.dw1.zero_()
    torch.testing.assert_close(module(query, key, value), expected, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------- precision, compile, dropout


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_half_precision_and_autocast():
    module = DCMHA(32, 4, batch_first=True, static=True)
    randomize(module.compose)
    x = torch.randn(2, 17, 32).bfloat16().float()
    causal = torch.zeros(17, 17).masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), -math.inf)
    exact, exact_weights = copy.deepcopy(module).double()(*[x.double()] * 3, attn_mask=causal)
    half = copy.deepcopy(module).bfloat16()
    for need_weights in (True, False):
        given = {"attn_mask": causal, "need_weights": need_weights}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = [module(x, x, x, **given), module(*[x.bfloat16()] * 3, **given)]
        results.append(half(*[x.bfloat16()] * 3, **given))
        for out, weights in results:
            assert out.dtype == torch.bfloat16
            assert relative_error(out, exact) < 0.03  # each of about ten roundings is 2 ** -9
            assert weights is None or relative_error(weights, exact_weights) < 0.03
    out.float().square().sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 and parameter.grad.isfinite().all() for parameter in half.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # autocast leaves float64 alone
        precise, _ = module.double()(*[x.double()] * 3, attn_mask=causal, need_weights=False)
    torch.testing.assert_close(precise, exact, **EXACT)


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compile(dynamo):
    module = randomize(DCMHA(16, 4, batch_first=True, num_kv_heads=2, window=4, qk_norm=True))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 9, 16, requires_grad=True)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 3:] = True
    grads = []
    for m in (module, compiled):
        out, _ = m(x, x, x, key_padding_mask=padding, need_weights=False, is_causal=True)
        grads.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for actual, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_new_length_compiles_nothing(dynamo):
    module, counter = randomize(DCMHA(16, 4, batch_first=True)), CompileCounter()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for T in (5, 9, 12, 17, 33, 40):
        x = torch.randn(2, T, 16)
        given = {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1), "need_weights": False}
        torch.testing.assert_close(compiled(x, x, x, **given)[0], module(x, x, x, **given)[0], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 2  # the first length, then all others


@pytest.mark.parametrize("need_weights", [True, False])
def test_checkpointing_repeats_dropout(need_weights):
    module = randomize(DCMHA(16, 4, dropout=0.5, batch_first=True))
    x = torch.randn(2, 9, 16, requires_grad=True)
    results = []
    for run in (lambda: module(x, x, x, need_weights=need_weights), None):
        torch.manual_seed(11)
        out, _ = run() if run else checkpoint(module, x, x, x, need_weights=need_weights, use_reentrant=False)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_dropout():
    mha = nn.MultiheadAttention(32, 2, dropout=0.3, batch_first=True, bias=False)
    module = DCMHA.from_mha(mha)
    with torch.no_grad():
        module.in_proj_weight[:64] = 0  # even weights, 1/S each
        module.in_proj_weight[64:], module.out_proj.weight[:] = torch.eye(32), torch.eye(32)
    S = 400
    x = torch.eye(S)[None, :, :32]  # key j of the first 32 marks channel j: outputs show single weights
    out, weights = module(x, x, x, average_attn_weights=False)
    shown = torch.cat([weights[0, 0, :, :16], weights[0, 1, :, 16:32]], dim=1)
    torch.testing.assert_close(out[0], shown, rtol=1e-5, atol=1e-8)
    for values in (weights, module(x, x, x, need_weights=False)[0]):
        dropped = values == 0
        share, sigma = dropped.double().mean(), math.sqrt(0.3 * 0.7 / values.numel())
        assert abs(share - 0.3) < 6 * sigma
        torch.testing.assert_close(values[~dropped], torch.full_like(values[~dropped], 1 / S / 0.7), rtol=1e-4, atol=0)
    module.eval()
    for need_weights in (True, False):
        assert (module(x, x, x, need_weights=need_weights)[0] != 0).all()


def test_empty_inputs():
    module = randomize(DCMHA(8, 2, batch_first=True))
    for B, T, S in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        query, key = torch.randn(B, T, 8), torch.randn(B, S, 8)
        for need_weights in (True, False):
            out, weights = module(query, key, key, need_weights=need_weights)
            assert out.shape == (B, T, 8) and out.isfinite().all()
            assert weights is None or weights.shape == (B, T, S)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "embed_dim=16 must be a multiple of num_heads=3"),
        ({"embed_dim": 0}, "embed_dim=0 must be at least 1"),
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
        ({"kdim": 0}, "kdim=0 must be at least 1"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be at least 1"),
        ({"window": 0}, "window=0 must be at least 1"),
        ({"groups": 3}, "groups=3 must divide num_heads=4"),
        ({"groups": 0}, "groups=0 must divide num_heads=4"),
        ({"rank": -1}, "rank=-1 must be at least 0"),
        ({"dropout": 1.5}, "dropout=1.5 must be between 0 and 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DCMHA(**{"embed_dim": 16, "num_heads": 4, **options})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.randn(2, 5, 15)}, r"query has shape \(2, 5, 15\); it must be \[batch, length, embed_dim=16\]"),
        ({"query": torch.randn(5, 16)}, r"key has shape \(2, 7, 10\)"),
        ({"query": torch.randn(1, 2, 5, 16)}, r"query has shape \(1, 2, 5, 16\)"),
        ({"key": torch.randn(2, 7, 16)}, r"key has shape \(2, 7, 16\); it must be \[batch, length, kdim=10\]"),
        ({"key": torch.randn(1, 7, 10)}, "batch sizes"),
        ({"value": torch.randn(2, 6, 16)}, "lengths of key and value"),
        ({"query": torch.randn(2, 5, 16).double()}, r"query has dtype torch.float64; it must be torch.float32"),
        ({"value": torch.randn(2, 7, 16).bfloat16()}, r"value has dtype torch.bfloat16"),
        ({"key": torch.randn(2, 7, 10, device="meta")}, "key is on meta and the parameters on cpu"),
        ({"key_padding_mask": torch.zeros(7, dtype=torch.bool)}, r"key_padding_mask has shape \(7,\); it must be \(2, 7\)"),
        ({"key_padding_mask": torch.zeros(2, 7, dtype=torch.int64)}, "key_padding_mask has dtype torch.int64; it must be bool"),
        ({"attn_mask": torch.zeros(7, 5)}, r"attn_mask has shape \(7, 5\); it must be \(5, 7\) or \(8, 5, 7\)"),
        ({"attn_mask": torch.zeros(2, 5, 7)}, r"attn_mask has shape \(2, 5, 7\)"),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.uint8)}, "attn_mask has dtype torch.uint8"),
        ({"attn_mask": torch.zeros(5, 7, device="meta")}, "attn_mask is on meta and query on cpu"),
    ],
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_bad_inputs(changes, message, need_weights):
    module = DCMHA(16, 4, kdim=10, batch_first=True)
    inputs = {"query": torch.randn(2, 5, 16), "key": torch.randn(2, 7, 10), "value": torch.randn(2, 7, 16), **changes}
    with pytest.raises(ValueError, match=message):
        module(**inputs, need_weights=need_weights)


def test_a_named_backend_does_what_it_can_or_says_why_not():
    x = torch.randn(2, 5, 8)
    with pytest.raises(ValueError, match=r"need_weights=True needs backend='auto' or 'reference'; 'chunked' makes no weights"):
        DCMHA(8, 2, backend="chunked")(x, x, x)
    with pytest.raises(ValueError, match="backend='nonsense' is unknown"):
        DCMHA(8, 2, backend="nonsense")(x, x, x, need_weights=False)
    assert DCMHA(8, 2, backend="reference")(x, x, x)[1] is not None


def test_compose_names_the_wrong_argument():
    compose = Compose(12, 4, key_embed_dim=7)
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 5, 7\); it must be \[batch, length, embed_dim=12\]"):
        compose(torch.randn(2, 5, 7), torch.randn(2, 5, 7))
    with pytest.raises(ValueError, match="key_embed_dim=7"):
        compose(torch.randn(2, 5, 12))
    with pytest.raises(ValueError, match="hidden has shape"):
        compose(torch.randn(5, 12), torch.randn(2, 5, 7))
    with pytest.raises(ValueError, match="key_embed_dim=0 must be at least 1"):
        Compose(12, 4, key_embed_dim=0)
