"""The Triton kernels in Triton's interpreter, against the reference in float64. `test_triton.py` runs this file."""

import os
from functools import partial

import pytest
import torch

from dcformer import composed_attention
from dcformer.ops.mixers.triton import launch
from dcformer.testing import check_backend, make_inputs

assert os.environ["TRITON_INTERPRET"] == "1"

# Tiles of launch.py take thousands of small steps of the interpreter; WIDE ones take few. None: those of launch.py.
WIDE = (32, 16, 32)
CASES = {
    "one": (dict(T=1), dict(is_causal=True), None),
    "own tiles": (dict(N=6, T=19, K=2), dict(is_causal=True), None),
    "own tiles, 16 heads": (dict(N=16, T=18, S=35, parts="qk"), dict(is_causal=True, window=9), None),
    "own tiles, 16 heads, static": (dict(N=16, T=18, parts="qkb", D=4), dict(is_causal=True), None),
    "63": (dict(B=2, N=3, T=63, D=8), dict(is_causal=True), WIDE),
    "65 grouped": (dict(N=12, T=65, D=8, K=4, G=2), dict(is_causal=True), WIDE),
    "32 heads, 80 channels": (dict(N=32, T=33, D=80), dict(is_causal=True), WIDE),
    "1025": (dict(N=2, T=1025, parts="qk"), dict(is_causal=True, window=700), (128, 64, 128)),
    "129 window": (dict(N=2, T=129, K=1), dict(is_causal=True, window=17), WIDE),
    "window wider than a tile": (dict(N=3, T=70, parts="qk"), dict(is_causal=True, window=50), WIDE),
    "one head": (dict(N=1, T=65, D=48, parts="qk"), dict(is_causal=True), WIDE),
    "25 heads": (dict(N=25, T=33, D=12), dict(is_causal=True), WIDE),
    "64 heads": (dict(N=64, T=17, D=4, parts="qk"), dict(is_causal=True), WIDE),
    "many rows": (dict(B=11, N=2, T=5, D=8), dict(is_causal=True), WIDE),
    "bidirectional window": (dict(T=65), dict(window=5), WIDE),
    "cross": (dict(B=2, T=21, S=65), dict(), WIDE),
    "more queries than keys": (dict(T=65, S=33), dict(is_causal=True, window=9), WIDE),
    "bool mask": (dict(T=37, mask="bool"), dict(), WIDE),
    "padding": (dict(B=3, T=33, mask="bool padding"), dict(is_causal=True, window=4), WIDE),
    "float mask": (dict(T=33, mask="float"), dict(is_causal=True), WIDE),
    "float mask by head": (dict(T=33, mask="float heads"), dict(window=11), WIDE),
    "rank 0": (dict(T=20, R=0, parts="qk"), dict(), WIDE),
    "rank 1": (dict(T=20, R=1, parts="qk", G=4), dict(), WIDE),
    "rank 3": (dict(T=20, R=3, parts="q"), dict(), WIDE),
    "rank 4": (dict(T=20, R=4), dict(), WIDE),
    "static": (dict(parts="b", G=2), dict(is_causal=True), WIDE),
    "query-wise": (dict(parts="q"), dict(is_causal=True), WIDE),
    "key-wise": (dict(parts="k", K=1), dict(is_causal=True), WIDE),
    "pre": (dict(sides="pre"), dict(is_causal=True), WIDE),
    "post": (dict(sides="post"), dict(is_causal=True), WIDE),
    "plain": (dict(sides=""), dict(is_causal=True), WIDE),
}


@pytest.fixture
def tiles(monkeypatch):
    """Sets the tiles: queries of a program, queries and keys of a tile."""
    chosen = launch.tiles_of

    def choose(sizes):
        if sizes is not None:
            monkeypatch.setattr(launch, "tiles_of", lambda *a: [launch.Tile(chosen(*a)[0].NP, *sizes)])

    return choose


def check(draw, **options):
    """Three draws together: by luck the reference may be right in each of the few numbers of one."""
    check_backend(draw, "triton", draws=3, **options)


@pytest.mark.parametrize("case", CASES)
def test_error_budget(case, tiles):
    sizes, options, tile = CASES[case]
    tiles(tile)
    check(partial(make_inputs, **sizes), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_budget_in_half(dtype, tiles):
    tiles(WIDE)
    check(partial(make_inputs, B=2, N=12, T=33, K=4, dtype=dtype), is_causal=True)


@pytest.mark.parametrize("options", [dict(), dict(window=9)])
def test_many_blocks(options, tiles, monkeypatch):
    """Small blocks, so that they cross borders in T and in B."""
    monkeypatch.setattr("dcformer.ops.driver._CPU_BLOCK", 300)
    monkeypatch.setattr("dcformer.ops.driver._CPU_MIN_QUERIES", 15)
    tiles(WIDE)
    check(partial(make_inputs, B=2, T=35, K=2), is_causal=True, **options)


def test_trials_of_tiles_leave_the_block_alone(tiles, monkeypatch):
    """Each tile runs forward and backward before one is chosen, on memory of its own."""
    tiles(WIDE)

    def choose(problem, candidates, trial, device, timed):
        run = trial()
        for tile in 2 * candidates:
            run(tile)
        return candidates[0]

    monkeypatch.setattr(launch, "choose", choose)
    check(partial(make_inputs, N=2, T=17, D=8, mask="float"), is_causal=True)


def test_rows_without_keys_and_nan_beyond(tiles, monkeypatch):
    """Rows that see nothing are zero with their gradients, whatever the memory between the rows of a buffer holds."""
    tiles(WIDE)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(torch.nan))
    inputs = make_inputs(B=2, T=37)
    mask = torch.ones(2, 1, 1, 37, dtype=torch.bool)
    mask[1, ..., :20] = False
    out = composed_attention(*inputs.call(), attn_mask=mask, is_causal=True, window=8, backend="triton")
    grads = torch.autograd.grad(out.square().sum(), inputs.floats())
    assert bool((out[1, :, :20] == 0).all()) and bool((out[0] != 0).any())
    assert all(bool(g.isfinite().all()) for g in grads)
    for grad in (grads[0][1, :, :20], grads[1][1, :, :20], grads[4][1, :20], grads[8][1, :20]):  # q, k, pre.query, post.key
        assert bool((grad == 0).all())


def test_documents(tiles, monkeypatch):
    tiles(WIDE)
    monkeypatch.setattr("dcformer.ops.driver._CPU_BLOCK", 300)
    documents = torch.randint(3, (2, 41)).cumsum(1)
    documents[0, 35:] = -1
    check(partial(make_inputs, B=2, T=29, S=41), document_ids=documents, is_causal=True)
    check(partial(make_inputs, B=2, T=29, S=41, mask="float"), document_ids=documents, window=9)


def test_decoding_equals_prefill(tiles):
    """A few queries without gradients have kernels of their own."""
    tiles(WIDE)
    inputs = make_inputs(B=2, K=2, T=40, parts="qk")
    for tensor in inputs.floats():
        tensor.requires_grad_(False)
    options = dict(is_causal=True, window=11, backend="triton")
    whole = composed_attention(*inputs.call(), **options)
    pieces = []
    for start, stop in ((0, 33), (33, 38), (38, 39), (39, 40)):
        pre, post = (c._replace(query=c.query[:, start:stop], key=c.key[:, :stop]) for c in (inputs.pre, inputs.post))
        q, k, v = inputs.query[:, :, start:stop], inputs.key[:, :, :stop], inputs.value[:, :, :stop]
        pieces.append(composed_attention(q, k, v, pre, post, **options))
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-4, atol=1e-5)


def test_compiled_in_one_graph(tiles):
    tiles(WIDE)
    inputs = make_inputs(B=2, K=2, T=20)
    step = torch.compile(
        lambda *a: composed_attention(*a, is_causal=True, backend="triton") * 2, fullgraph=True, backend="aot_eager"
    )
    outs = [f(*inputs.call()) for f in (step, lambda *a: composed_attention(*a, is_causal=True, backend="triton") * 2)]
    grads = [torch.autograd.grad(out.sum(), inputs.floats()) for out in outs]
    for compiled, plain in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(compiled, plain)


def test_dropout_gradients(tiles):
    """With the mask that the forward drew, read off an identity value, the output is that of the masked weights."""
    tiles(WIDE)
    inputs = make_inputs(T=16, D=16)
    q, k, _, pre, post = inputs.call()
    outs = []
    for value in (torch.eye(16).expand(1, 4, 16, 16), inputs.value):
        torch.manual_seed(2)
        outs.append(composed_attention(q, k, value, pre, post, dropout_p=0.4, backend="triton"))
    torch.testing.assert_close(outs[0] @ inputs.value, outs[1], rtol=1e-4, atol=1e-5)
    actual, expected = (
        torch.autograd.grad(o.sum(), inputs.value, retain_graph=True)[0] for o in (outs[1], outs[0] @ inputs.value)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_what_it_refuses():
    def reason(dtype=torch.float32, pre=None, **sizes):
        inputs = make_inputs(dtype=dtype, **sizes)
        inputs.pre = inputs.pre if pre is None else pre
        with pytest.raises(ValueError) as error:
            composed_attention(*inputs.call(), backend="triton")
        return str(error.value)

    assert "float64" in reason(torch.float64)
    assert "at most 64 heads" in reason(N=65, T=3)
    assert "equally many groups" in reason(N=4, T=3, pre=make_inputs(N=4, T=3, G=2).pre)
