"""`Compose` against its equations: every ablation, cross-attention, initialisation, what learns when."""

import math

import pytest
import torch
from by_hand import ABLATIONS, EXACT, double, name, weights_by_hand
from torch import nn

from dcformer import DCMHA, Compose


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


def assert_deviation(values, std):
    """Mean and deviation within six of their own deviations, and enough values for that to be under 5 %."""
    values, tolerance = values.detach().double(), 6 / math.sqrt(2 * values.numel())
    assert tolerance < 0.05
    assert abs(values.square().mean().sqrt() / std - 1) < tolerance
    assert abs(values.mean() / std) < 2 * tolerance


def test_compose_initialisation_has_the_papers_deviations():
    E, N, R, G = 96, 160, 1, 2
    n, inner = N // G, 2 * R * (N // G)
    compose = Compose(E, N, groups=G, rank=R, static=True, gate_std=0.05)
    assert_deviation(compose.dynamic.dw1, math.sqrt(2 / (E + inner)))
    assert_deviation(compose.dynamic.qkw, 0.01 * 2 / (n + R) * math.sqrt(1 / inner))
    assert_deviation(compose.dynamic.dd, 0.05 * math.sqrt(2 / (E + n)))
    assert_deviation(compose.pre_base, 0.1 / math.sqrt(n))
    assert_deviation(compose.post_base, 0.1 / math.sqrt(n))
    assert_deviation(Compose(E, N).dynamic.dd, 0.005 * math.sqrt(2 / (E + N)))


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
