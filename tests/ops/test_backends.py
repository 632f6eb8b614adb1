"""Every backend against the reference in float64: outputs and all gradients within the error budget."""

import pytest
import torch
import torch.nn.functional as F

from dcformer import composed_attention
from dcformer.ops.mixers import MIXERS
from dcformer.testing import Inputs, assert_within_budget, check_backend, make_inputs, results

BACKENDS = list(MIXERS)

# Odd lengths, head counts and head dims, with the features spread over them.
CASES = {
    "one": (dict(T=1), dict(is_causal=True)),
    "63": (dict(B=2, N=3, T=63, D=32), dict(is_causal=True)),
    "65 grouped": (dict(B=2, N=12, T=65, D=64, K=4, G=2), dict(is_causal=True)),
    "129 window": (dict(N=16, T=129, D=80, K=8), dict(is_causal=True, window=17)),
    "1025": (dict(N=4, T=1025, D=32, parts="qk"), dict(is_causal=True)),
    "1025 window": (dict(N=2, T=1025, D=32, parts="qk"), dict(is_causal=True, window=100)),
    "one head": (dict(N=1, T=65, D=48, parts="qk"), dict(is_causal=True)),
    "25 heads": (dict(N=25, T=65, D=96), dict(is_causal=True)),
    "32 heads": (dict(N=32, T=63, D=128, parts="qk"), dict(is_causal=True)),
    "many rows": (dict(B=37, N=2, T=5, D=8), dict(is_causal=True)),
    "bidirectional": (dict(B=2, T=65), dict()),
    "bidirectional window": (dict(B=2, T=65), dict(window=5)),
    "cross": (dict(B=2, T=33, S=65), dict()),
    "chunk": (dict(B=2, T=33, S=129), dict(is_causal=True)),
    "chunk window": (dict(B=2, T=33, S=129), dict(is_causal=True, window=40)),
    "more queries than keys": (dict(T=65, S=33), dict(is_causal=True, window=9)),
    "bool mask": (dict(B=2, T=65, mask="bool"), dict()),
    "padding": (dict(B=3, T=65, mask="bool padding"), dict(is_causal=True, window=4)),
    "float mask": (dict(B=2, T=65, mask="float"), dict(is_causal=True)),
    "float mask by head": (dict(B=2, T=65, mask="float heads"), dict(window=11)),
    "rank 0": (dict(R=0, parts="qk"), dict()),
    "rank 1": (dict(R=1, parts="qk", G=4), dict()),
    "rank 5": (dict(R=5, parts="k"), dict()),
    "static": (dict(parts="b", G=2), dict(is_causal=True)),
    "query-wise": (dict(parts="q"), dict(is_causal=True)),
    "key-wise": (dict(parts="k", K=1), dict(is_causal=True)),
    "pre": (dict(sides="pre"), dict(is_causal=True)),
    "post": (dict(sides="post"), dict(is_causal=True)),
    "plain": (dict(sides=""), dict(is_causal=True)),
    "scale": (dict(), dict(scale=0.3)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_budget(backend, case, dtype):
    sizes, options = CASES[case]
    check_backend(lambda: make_inputs(dtype=dtype, **sizes), backend, **options)


@pytest.mark.parametrize("case", CASES)
def test_many_blocks(case, monkeypatch):
    """Small blocks, so that every case crosses block borders in T and in B."""
    monkeypatch.setattr("dcformer.ops.driver._CPU_BLOCK", 300)
    sizes, options = CASES[case]
    if sizes.get("T", 0) > 1000:
        sizes = {**sizes, "T": 257}
    inputs = make_inputs(dtype=torch.float64, **sizes)
    grad = torch.randn(inputs.query.shape)
    for actual, expected in zip(
        results(inputs, grad, backend="chunked", **options), results(inputs, grad, backend="reference", **options), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(65, 1), (2, 1, 1, 65), (1, 4, 1, 1), (2, 4, 65, 65), (1,)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_broadcast_and_so_do_their_gradients(backend, shape):
    """A mask that is one for all keys changes nothing: its gradient is rounding, which no budget measures."""
    inputs = make_inputs(B=2, T=65)
    inputs.attn_mask = torch.randn(shape, requires_grad=True)
    grad = torch.randn(inputs.query.shape)
    actual = results(inputs, grad, backend=backend, is_causal=True)
    expected = results(inputs.to(torch.float64), grad, backend="reference", is_causal=True)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_threads(backend, threads):
    """Any number of threads keeps the error budget, and gives the same bits each time."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check_backend(lambda: make_inputs(B=3, N=6, T=260, K=2, mask="float"), backend, is_causal=True)
        inputs = make_inputs(B=3, N=6, T=260, K=2, mask="float")
        grad = torch.randn(inputs.query.shape)
        first, again = (results(inputs, grad, backend=backend, is_causal=True) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_and_expanded(backend):
    """Inputs as models make them (heads beside channels), expanded ones, and gradients that are expanded or sliced."""
    base = make_inputs(B=2, N=4, T=65, D=32, parts="qk")
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in base.call()[:3])
    k = k[:1, :1].expand(2, 4, 65, 32)
    packed = torch.randn(2, 4, 65, 40)
    v = packed[..., :32]
    rows = torch.randn(2, 65, 4, 5)
    pre = base.pre._replace(query=rows.transpose(2, 3), key=torch.randn(1, 1, 5, 4).expand(2, 65, 5, 4))
    inputs = Inputs(*(t.requires_grad_() for t in (q, k, v)), pre, base.post)
    out = composed_attention(*inputs.call(), is_causal=True, backend=backend)
    expected = composed_attention(*inputs.call(), is_causal=True, backend="reference")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for loss in (
        lambda o: o.sum(),
        lambda o: (torch.cat([o, o[..., :3]], -1) * torch.arange(35)).sum(),
        lambda o: o.transpose(1, 2)[:, ::2].sum(),
    ):
        actual, wanted = (
            torch.autograd.grad(loss(out), (q, v), retain_graph=True),
            torch.autograd.grad(loss(expected), (q, v), retain_graph=True),
        )
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_rows_without_keys_are_zero(backend):
    """Padding longer than the window: zeros in the output and in every gradient of that row, no NaN anywhere."""
    inputs = make_inputs(B=2, T=40)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1, ..., :20] = False
    out = composed_attention(*inputs.call(), attn_mask=mask, is_causal=True, window=8, backend=backend)
    assert bool((out[1, :, :20] == 0).all())
    assert bool((out[0] != 0).any())
    grads = torch.autograd.grad(out.square().sum(), inputs.floats())
    assert all(bool(g.isfinite().all()) for g in grads)
    assert bool((grads[0][1, :, :20] == 0).all())  # query
    assert bool((grads[1][1, :, :20] == 0).all())  # key
    assert bool((grads[4][1, :20] == 0).all())  # pre.query
    assert bool((grads[8][1, :20] == 0).all())  # post.key


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_fully_masked_by_a_float(backend):
    inputs = make_inputs(T=9)
    mask = torch.zeros(9, 9)
    mask[3] = -torch.inf
    out = composed_attention(*inputs.call(), attn_mask=mask, backend=backend)
    grads = torch.autograd.grad(out.sum(), inputs.floats())
    assert bool((out[:, :, 3] == 0).all()) and bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_padding_is_invisible(backend):
    """A left-padded row equals itself alone, whatever lies in the padding, key-wise weights included."""
    inputs = make_inputs(B=2, T=50, parts="qk")
    mask = torch.ones(2, 1, 1, 50, dtype=torch.bool)
    mask[1, ..., :13] = False
    with torch.no_grad():
        for tensor in (inputs.query, inputs.key, inputs.value):
            tensor[1, :, :13] = 1e4
        for composition in (inputs.pre, inputs.post):
            composition.query[1, :13] = 1e4
            composition.key[1, :13] = -1e4
    padded = composed_attention(*inputs.call(), attn_mask=mask, is_causal=True, backend=backend)[1:, :, 13:]

    def cut(composition):
        return composition._replace(query=composition.query[1:, 13:], key=composition.key[1:, 13:])

    q, k, v = (t[1:, :, 13:] for t in inputs.call()[:3])
    alone = composed_attention(q, k, v, cut(inputs.pre), cut(inputs.post), is_causal=True, backend=backend)
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(padded.sum(), inputs.floats())
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("window", [None, 7])
def test_prefill_chunk_decode(backend, window):
    """The whole at once equals a prefill, a chunk and single steps."""
    inputs = make_inputs(B=2, N=4, K=2, T=40)
    options = dict(is_causal=True, window=window, backend=backend)
    whole = composed_attention(*inputs.call(), **options)
    pieces = []
    for start, stop in ((0, 17), (17, 30), *((i, i + 1) for i in range(30, 40))):

        def part(c, start=start, stop=stop):
            return c._replace(query=c.query[:, start:stop], key=c.key[:, :stop])

        q, k, v = inputs.query[:, :, start:stop], inputs.key[:, :, :stop], inputs.value[:, :, :stop]
        pieces.append(composed_attention(q, k, v, part(inputs.pre), part(inputs.post), **options))
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_window_is_exact(backend, causal):
    """Query i sees key i-W+1 and not key i-W; without causality the same on the other side."""
    inputs = make_inputs(T=30)
    i, W = 15, 6

    def moved(j):
        value = inputs.value.detach().clone()
        value[:, :, j] += 1
        out = composed_attention(*inputs.call()[:2], value, *inputs.call()[3:], is_causal=causal, window=W, backend=backend)
        return bool((out[:, :, i] != plain[:, :, i]).any())

    plain = composed_attention(*inputs.call(), is_causal=causal, window=W, backend=backend)
    assert [moved(j) for j in (i - W, i - W + 1, i, i + 1)] == [False, True, True, not causal]
    assert [moved(j) for j in (i + W - 1, i + W)] == [not causal, False]


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_groups_do_not_mix(backend):
    """Two groups at once equal each group alone."""
    inputs = make_inputs(B=2, N=8, T=20, G=2)
    whole = composed_attention(*inputs.call(), is_causal=True, backend=backend)
    for g, heads in enumerate((slice(0, 4), slice(4, 8))):

        def part(c, g=g, heads=heads):
            return c._replace(base=c.base[g : g + 1], query=c.query[..., heads], key=c.key[..., heads], groups=1)

        q, k, v = (t[:, heads] for t in inputs.call()[:3])
        alone = composed_attention(q, k, v, part(inputs.pre), part(inputs.post), is_causal=True, backend=backend)
        torch.testing.assert_close(whole[:, heads], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", [None, "bool padding", "float", "float heads"])
@pytest.mark.parametrize("options", [dict(), dict(is_causal=True, window=9)], ids=["bidirectional", "causal window"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_packed_into_a_row(backend, options, mask, monkeypatch):
    """Borders inside blocks, documents of one position, numbers that are left out, padding."""
    monkeypatch.setattr("dcformer.ops.driver._CPU_BLOCK", 300)
    documents = packed(2, 65)
    check_backend(lambda: make_inputs(B=2, T=45, S=65, mask=mask), backend, document_ids=documents, **options)


def packed(B, S):
    """Documents of random lengths, and padding behind the last."""
    documents = torch.randint(3, (B, S)).cumsum(1)
    documents[0, S - 7 :] = -1
    return documents


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_are_as_if_each_stood_alone(backend):
    inputs = make_inputs(T=40)
    documents = torch.tensor([[0] * 17 + [5] + [2] * 15 + [-1] * 7])
    options = dict(is_causal=True, backend=backend)
    out = composed_attention(*inputs.call(), document_ids=documents, **options)
    grads = torch.autograd.grad(out.square().sum(), inputs.floats())
    for start, stop in ((0, 17), (17, 18), (18, 33)):
        q, k, v = (t[:, :, start:stop] for t in inputs.call()[:3])
        pre, post = (c._replace(query=c.query[:, start:stop], key=c.key[:, start:stop]) for c in (inputs.pre, inputs.post))
        torch.testing.assert_close(
            out[:, :, start:stop], composed_attention(q, k, v, pre, post, **options), rtol=1e-4, atol=1e-5
        )
    assert bool((out[:, :, 33:] == 0).all())
    for grad in (*grads[:3], *(g.transpose(1, 2) for g in grads[4:6]), *(g.transpose(1, 2) for g in grads[7:9])):
        assert bool((grad[:, :, 33:] == 0).all()) and bool((grad[:, :, :33] != 0).any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_identity_is_sdpa(backend):
    inputs = make_inputs(B=2, N=4, T=70, D=32, sides="")
    qkv = inputs.call()[:3]
    exact = [t.detach().double().requires_grad_() for t in qkv]

    def with_grads(out, given):
        return out, *torch.autograd.grad(out.square().sum(), given)

    actual = with_grads(composed_attention(*qkv, is_causal=True, backend=backend), qkv)
    plain, expected = (with_grads(F.scaled_dot_product_attention(*x, is_causal=True), x) for x in (qkv, exact))
    for i, (a, p, e) in enumerate(zip(actual, plain, expected, strict=True)):
        assert_within_budget(a, p, e, factor=2 if i == 0 else 3, what="output" if i == 0 else f"gradient {i - 1}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_equal_scores_in_fp16(backend):
    """70,000 equal scores: their sum exceeds the range of fp16."""
    q, k = torch.zeros(1, 2, 1, 8, dtype=torch.float16), torch.zeros(1, 2, 70_000, 8, dtype=torch.float16)
    v = torch.ones(1, 2, 70_000, 8, dtype=torch.float16)
    out = composed_attention(q, k, v, backend=backend)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_and_no_queries(backend):
    for B, T, S in ((1, 0, 5), (1, 5, 0), (1, 0, 0), (0, 5, 5)):
        inputs = make_inputs(B=B, T=T, S=S)
        out = composed_attention(*inputs.call(), backend=backend)
        assert out.shape == (B, 4, T, 16) and bool((out == 0).all())
        assert all(bool((g == 0).all()) for g in torch.autograd.grad(out.sum(), inputs.floats()))
