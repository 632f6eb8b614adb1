"""The Triton kernels for few queries, in Triton's interpreter, against the reference. `test_triton.py` runs this file."""

import os
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcformer import Composition, composed_attention
from dcformer.ops import driver, reference
from dcformer.ops.mixers import MIXERS, Call
from dcformer.ops.mixers.triton import decoding, launch_decoding
from dcformer.testing import Inputs, check_backend, make_inputs

assert os.environ["TRITON_INTERPRET"] == "1"

# Sizes, options, and how many programs there shall be.
CASES = {
    "one key": (dict(T=1, S=1), dict(is_causal=True), 4),
    "15": (dict(T=1, S=15, B=2), dict(is_causal=True), 4),
    "16": (dict(T=1, S=16, K=2, parts="qk"), dict(is_causal=True), 4),
    "17": (dict(T=1, S=17, K=1), dict(), 4),
    "130": (dict(T=1, S=130, N=16, K=4, parts="qk"), dict(is_causal=True), 3),
    "130 in one program": (dict(T=2, S=130, B=3), dict(is_causal=True), 1),
    "130 in many programs": (dict(T=3, S=130, N=6, K=2), dict(is_causal=True), 100),
    "rows of a product to spare": (dict(T=5, S=40, N=12, K=2), dict(is_causal=True), 4),
    "25 heads": (dict(T=2, S=50, N=25, D=48), dict(is_causal=True), 4),
    "32 heads": (dict(T=4, S=70, N=32, K=8, D=80, parts="qk"), dict(is_causal=True), 4),
    "64 heads": (dict(T=3, S=40, N=64, K=4), dict(is_causal=True), 4),
    "grouped": (dict(T=2, S=40, N=12, K=4, G=2), dict(is_causal=True), 4),
    "a group across key heads": (dict(T=2, S=40, N=12, K=3, G=2, B=2), dict(is_causal=True), 4),
    "groups within a key head": (dict(T=2, S=40, N=8, K=1, G=4), dict(), 8),
    "window": (dict(T=1, S=130), dict(is_causal=True, window=33), 4),
    "window of few queries": (dict(T=4, S=130, B=2), dict(is_causal=True, window=17), 4),
    "window of one": (dict(T=3, S=40), dict(is_causal=True, window=1), 4),
    "bidirectional window": (dict(T=7, S=40), dict(window=5), 4),
    "more queries than keys": (dict(T=6, S=3), dict(is_causal=True, window=2), 4),
    "bool mask": (dict(T=3, S=40, mask="bool"), dict(), 4),
    "padding": (dict(B=3, T=1, S=70, mask="bool padding"), dict(is_causal=True, window=50), 6),
    "float mask": (dict(T=2, S=40, mask="float"), dict(is_causal=True), 4),
    "float mask by head": (dict(T=2, S=40, mask="float heads"), dict(window=31), 4),
    "rank 0": (dict(T=1, S=40, R=0, parts="qk"), dict(), 4),
    "rank 1": (dict(T=1, S=40, R=1, parts="qk", G=4), dict(), 4),
    "rank 3": (dict(T=3, S=40, R=3, parts="q"), dict(), 4),
    "rank 4": (dict(T=2, S=40, R=4), dict(), 4),
    "static": (dict(T=2, S=40, parts="b", G=2), dict(is_causal=True), 4),
    "key-wise": (dict(T=2, S=40, parts="k", K=1), dict(is_causal=True), 4),
    "pre": (dict(T=2, S=40, sides="pre"), dict(is_causal=True), 4),
    "post": (dict(T=2, S=40, sides="post"), dict(is_causal=True), 4),
    "plain": (dict(T=2, S=40, K=2, sides=""), dict(is_causal=True), 8),
    "scale": (dict(T=2, S=40), dict(scale=0.3), 4),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The driver is not to serve a call in place of the kernels, and fresh buffers hold NaN."""
    monkeypatch.setattr(driver, "_forward", None)
    empty, new_empty = torch.empty, torch.Tensor.new_empty
    poison = lambda made: made.fill_(torch.nan) if made.is_floating_point() and made.device.type == "cpu" else made  # noqa: E731
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))


@pytest.fixture(autouse=True)
def no_gradients():
    """With them the driver serves a call, so that the backward makes the same scores again."""
    with torch.no_grad():
        yield


@pytest.fixture
def programs(monkeypatch):
    """Sets how many programs there shall be."""
    return lambda count: monkeypatch.setattr(launch_decoding, "_programs", lambda device: count)


def draw(*args, **sizes) -> Inputs:
    inputs = make_inputs(*args, **sizes)
    for tensor in inputs.floats():
        tensor.requires_grad_(False)
    return inputs


@pytest.mark.parametrize("case", CASES)
def test_error_budget(case, programs):
    sizes, options, count = CASES[case]
    programs(count)
    check_backend(partial(draw, **sizes), "triton", gradients=False, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mask", [None, "float"])
def test_error_budget_in_half(dtype, mask):
    make = partial(draw, B=2, N=12, T=2, S=70, K=4, D=48, mask=mask, dtype=dtype)
    check_backend(make, "triton", gradients=False, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("D, E, R", [(24, 40, 2), (80, 16, 1)])
def test_views_of_a_cache(dtype, D, E, R):
    """Keys and values with their weights behind them, strided queries, and NaN behind the last key, which nobody reads."""
    B, N, T, S, most = 2, 6, 2, 45, 64

    def make():
        drawn = draw(B, N, T, D, S=most, R=R, dtype=dtype)
        sides = []
        for states, side in ((drawn.key, drawn.pre), (torch.randn(B, N, most, E).to(dtype), drawn.post)):
            cache = torch.cat([states, side.key.permute(0, 3, 1, 2)], 3)
            cache[:, :, S:] = torch.nan
            query = side.query.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
            size = states.shape[3]
            weights = cache[:, :, :S, size:].permute(0, 2, 3, 1)
            sides.append((cache[:, :, :S, :size], Composition(side.base, query, weights)))
        (key, pre), (value, post) = sides
        return Inputs(drawn.query.transpose(1, 2).contiguous().transpose(1, 2), key, value, pre, post)

    check_backend(make, "triton", gradients=False, is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_static_cache(kind, programs):
    """A mask hides what is not filled yet, in whole splits and within one; one sequence sees nothing at all."""
    programs(12)
    inputs = draw(B=3, T=2, S=200, K=2)
    mask = torch.ones(3, 1, 2, 200, dtype=torch.bool)
    mask[0, :, :, 20:], mask[1, :, :, :150], mask[2] = False, False, False
    inputs.attn_mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    pre, post = inputs.pre, inputs.post
    call = Call(*inputs.call(), inputs.attn_mask, None, False, None, 0.25, 0.0)
    out, statistics = MIXERS["triton"].forward(call)
    expected = composed_attention(*inputs.call(), attn_mask=inputs.attn_mask, scale=0.25, backend="reference")
    torch.testing.assert_close(out[:2], expected[:2], rtol=1e-4, atol=1e-5)
    assert bool((out[2] == 0).all())
    assert bool((statistics[2] == torch.tensor([0.0, 1.0])).all())
    short = [side._replace(query=side.query[:1], key=side.key[:1, :20]) for side in (pre, post)]
    alone = composed_attention(*(t[:1] for t in (inputs.query, inputs.key[:, :, :20], inputs.value[:, :, :20])), *short)
    torch.testing.assert_close(out[:1], alone, rtol=1e-4, atol=1e-5)


def test_statistics_and_the_same_bits(programs):
    """The statistics are those of the composed scores; a call repeated gives the same bits."""
    programs(5)
    inputs = draw(T=2, S=90)
    out, statistics = MIXERS["triton"].forward(Call(*inputs.call(), None, None, True, None, 0.25, 0.0))
    a = reference.compose(reference.scores(inputs.query, inputs.key, 0.25), inputs.pre)
    a = a.masked_fill(~reference.visible_keys(2, 90, True, None), -torch.inf)
    largest = a.amax(-1, keepdim=True)
    expected = torch.cat([largest, (a - largest).exp().sum(-1, keepdim=True)], -1)
    torch.testing.assert_close(statistics, expected, rtol=1e-4, atol=1e-5)
    again = MIXERS["triton"].forward(Call(*inputs.call(), None, None, True, None, 0.25, 0.0))
    assert torch.equal(out, again[0]) and torch.equal(statistics, again[1])


def test_what_it_leaves_to_the_driver(monkeypatch):
    def served(dropout_p=0.0, **sizes):
        inputs = draw(device="meta", **sizes)
        seed = torch.tensor(1) if dropout_p else None
        return launch_decoding.serves(Call(*inputs.call(), None, seed, True, None, 1.0, dropout_p))

    assert served(T=1, N=64, K=1) and served(T=8, N=2) and served(T=8, N=64, K=8)
    assert not served(T=9, N=2) and not served(T=2, N=64, K=1) and not served(T=1, D=257) and not served(T=1, dropout_p=0.1)
    assert served(T=1, N=1, D=1, S=(1 << 30) - 1, sides="") and not served(T=1, N=1, D=1, S=1 << 30, sides="")

    class Taken(Exception):
        pass

    def take(*_):
        raise Taken

    monkeypatch.setattr(driver, "_forward", take)
    with torch.enable_grad(), pytest.raises(Taken):
        composed_attention(*make_inputs(T=1).call(), backend="triton")


@pytest.mark.parametrize("window", [None, 300])
def test_a_cuda_graph_can_record_it(monkeypatch, window):
    """Beside the three launches there are views and empty buffers, whose shapes are known."""
    launches, seen = [], set()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *a, **k: launches.append(grid)

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    for name in ("score_keys", "weigh_values", "add_splits"):
        monkeypatch.setattr(decoding, name, Kernel())
    inputs = draw(N=16, T=1, S=4096, D=64, mask="bool", dtype=torch.bfloat16, device="meta")
    call = Call(*inputs.call(), inputs.attn_mask[None, None], None, True, window, 0.125, 0.0)
    with Recorded():
        MIXERS["triton"].forward(call)
    assert len(launches) == 3 and launches[0] == launches[1]
    assert seen <= {"aten.new_empty", "aten.view", "aten.detach"}
