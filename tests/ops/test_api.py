"""The contract around the backends: choice, bad input, registration, autograd, compile, autocast, dropout, memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dcformer import Composition, composed_attention
from dcformer.ops import composed_weights, explain, register_mixer
from dcformer.ops.autograd import composed_attention_backward_op, composed_attention_op
from dcformer.ops.driver import _CPU_MIN_QUERIES, _GPU_MIN_QUERIES, _spans
from dcformer.ops.mixers import MIXERS, Call
from dcformer.ops.mixers.chunked import ChunkedMixer
from dcformer.testing import make_inputs


@pytest.fixture
def toy():
    """A mixer that serves one head only and counts its calls."""

    class ToyMixer(ChunkedMixer):
        name = "toy"
        priority = 1000
        calls = 0

        def refuses(self, call):
            return None if call.query.shape[1] == 1 else "it mixes one head only"

        def mix_forward(self, scores, block):
            type(self).calls += 1
            return super().mix_forward(scores, block)

    register_mixer(ToyMixer())
    yield ToyMixer
    del MIXERS["toy"]


def test_a_mixer_plugs_in(toy):
    one, two = make_inputs(N=1, T=9), make_inputs(N=2, T=9)
    expected = composed_attention(*one.call(), backend="chunked")
    torch.testing.assert_close(composed_attention(*one.call()), expected)
    assert toy.calls == 1
    composed_attention(*one.call(), backend="toy").sum().backward()
    assert toy.calls == 2
    composed_attention(*two.call())
    assert toy.calls == 2
    with pytest.raises(ValueError, match=r"backend='toy' cannot serve this request: it mixes one head only"):
        composed_attention(*two.call(), backend="toy")
    with pytest.raises(ValueError, match="taken"):
        register_mixer(toy())


def test_explain(toy):
    one, two = explain(*make_inputs(N=1, T=9).call()), explain(*make_inputs(N=2, T=9).call(), is_causal=True, window=3)
    assert one.backend == "toy" and one.reasons["toy"] == "chosen"
    assert two.backend != "toy" and two.reasons["toy"] == "it mixes one head only"
    assert set(two.reasons) == {*MIXERS, "reference"}
    assert "auto takes" in str(two) and "one head only" in str(two)
    with pytest.raises(ValueError, match="window=0"):
        explain(*make_inputs().call(), window=0)


def bad(expected, **changes):
    return pytest.param(changes, expected, id=expected)


@pytest.mark.parametrize(
    "changes, expected",
    [
        bad(r"query has shape \(4, 16\)", query=torch.zeros(4, 16)),
        bad(r"query has dtype torch.int64", query=torch.zeros(1, 4, 9, 16, dtype=torch.long)),
        bad(r"batch sizes 1, 2, 1", key=torch.zeros(2, 4, 9, 16)),
        bad(r"head_dim 8 and query 16", key=torch.zeros(1, 4, 9, 8)),
        bad(r"value has heads and length", value=torch.zeros(1, 4, 8, 16)),
        bad(r"4 heads and key 3", key=torch.zeros(1, 3, 9, 16), value=torch.zeros(1, 3, 9, 16)),
        bad(r"key has dtype torch.bfloat16", key=torch.zeros(1, 4, 9, 16, dtype=torch.bfloat16)),
        bad(r"value is on meta", value=torch.zeros(1, 4, 9, 16, device="meta")),
        bad(r"document_ids has shape \(1, 8\)", document_ids=torch.zeros(1, 8, dtype=torch.long)),
        bad(r"document_ids has dtype torch.float32", document_ids=torch.zeros(1, 9)),
        bad(r"document_ids is on meta", document_ids=torch.zeros(1, 9, dtype=torch.long, device="meta")),
        bad(
            r"document_ids names 5 positions",
            document_ids=torch.zeros(1, 5, dtype=torch.int),
            key=torch.zeros(1, 4, 5, 16),
            value=torch.zeros(1, 4, 5, 16),
        ),
        bad(r"window=0", window=0),
        bad(r"window=-3", window=-3),
        bad(r"window=2.0", window=2.0),
        bad(r"window=inf", window=float("inf")),
        bad(r"window=True", window=True),
        bad(r"query has 0 heads", query=torch.zeros(1, 0, 9, 16)),
        bad(r"dropout_p=1.5", dropout_p=1.5),
        bad(r"dropout_p=-0.1", dropout_p=-0.1),
        bad(r"backend='cuda' is unknown; choose one of 'auto'", backend="cuda"),
        bad(r"pre.groups=3 must divide the 4 heads", pre=Composition(query=torch.zeros(1, 9, 5, 4), groups=3)),
        bad(r"pre.groups=0", pre=Composition(query=torch.zeros(1, 9, 5, 4), groups=0)),
        bad(r"pre.base has shape \(4, 4\)", pre=Composition(torch.zeros(4, 4))),
        bad(r"post.query has shape \(1, 9, 4, 4\)", post=Composition(query=torch.zeros(1, 9, 4, 4))),
        bad(r"post.key has shape \(1, 8, 5, 4\)", post=Composition(key=torch.zeros(1, 8, 5, 4))),
        bad(r"post.key has dtype torch.float64", post=Composition(key=torch.zeros(1, 9, 5, 4, dtype=torch.float64))),
        bad(r"attn_mask has shape \(9, 8\)", attn_mask=torch.zeros(9, 8)),
        bad(r"attn_mask has shape \(1, 1, 1, 9, 9\)", attn_mask=torch.zeros(1, 1, 1, 9, 9)),
        bad(
            r"attn_mask has dtype torch.float64; it must be torch.float32 as query or bool",
            attn_mask=torch.zeros(9, 9).double(),
        ),
    ],
)
def test_bad_input(changes, expected):
    arguments = dict(zip(("query", "key", "value", "pre", "post"), make_inputs(T=9).call(), strict=True)) | changes
    if "query" in changes or "key" in changes:
        arguments |= {"pre": None, "post": None}
    with pytest.raises(ValueError, match=expected):
        composed_attention(**arguments)


@pytest.mark.parametrize("kind", ["plain", "causal window", "bool padding", "float heads"])
def test_reference_gradcheck(kind):
    inputs = make_inputs(
        N=4, K=2, T=3, S=4, D=2, R=1, G=2, mask=kind if "a" not in kind.split()[0] else None, dtype=torch.float64
    )
    options = dict(is_causal=True, window=2) if kind == "causal window" else {}
    if kind == "bool padding":
        inputs.attn_mask = torch.tensor([[[[True, False, True, True]]]])
    if kind == "float heads":
        inputs.attn_mask = torch.randn(1, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    tensors = inputs.floats()

    def run(q, k, v, a, b, c, d, e, f, mask=inputs.attn_mask):
        pre, post = Composition(a, b, c, 2), Composition(d, e, f, 2)
        return composed_attention(q, k, v, pre, post, attn_mask=mask, backend="reference", **options)

    assert torch.autograd.gradcheck(run, tensors)


def calls_of_the_operators(parts):
    """Tensors and settings, and whether the mask needs a gradient."""
    inputs = make_inputs(B=2, N=4, K=2, T=9, S=12, parts=parts, mask="float heads")
    pre, post = inputs.pre or Composition(), inputs.post or Composition()
    for mask, seed in ((inputs.attn_mask, None), (torch.rand(2, 1, 1, 12) > 0.2, torch.tensor(3))):
        settings = (1, 1, True, 5, 0.25, 0.0 if seed is None else 0.3)
        yield (*inputs.call()[:3], *pre[:3], *post[:3], mask, seed), settings, seed is None


@pytest.mark.parametrize("parts", ["bqk", "q", ""])
def test_opcheck(parts):
    for tensors, settings, mask_needs_grad in calls_of_the_operators(parts):
        tensors = (*tensors, None if mask_needs_grad else torch.randint(3, (2, 12)))  # documents
        torch.library.opcheck(composed_attention_op, (*tensors, *settings, "chunked"))
        tensors = tuple(tensor if tensor is None else tensor.detach() for tensor in tensors)
        out, statistics = composed_attention_op(*tensors, *settings, "chunked")
        arguments = (torch.randn_like(out), *tensors, statistics, mask_needs_grad, *settings, "chunked")
        torch.library.opcheck(composed_attention_backward_op, arguments)


@pytest.mark.parametrize("parts", ["bqk", "q", ""])
def test_opcheck_of_the_cpu_kernel(parts):
    if explain(*make_inputs().call()).backend != "cpu":
        pytest.skip("no CPU kernel here")
    for tensors, settings, mask_needs_grad in calls_of_the_operators(parts):
        tensors = tuple(tensor if tensor is None else tensor.detach() for tensor in tensors)
        torch.library.opcheck(torch.ops.dcformer_cpu.forward.default, (*tensors, *settings))
        out, statistics = torch.ops.dcformer_cpu.forward(*tensors, *settings)
        arguments = (torch.randn_like(out), *tensors, statistics, mask_needs_grad, *settings)
        torch.library.opcheck(torch.ops.dcformer_cpu.backward.default, arguments)


def test_compile_fullgraph_without_recompiles():
    """12 lengths, forward and backward: one graph, compiled at most twice (static, then dynamic)."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, pre, post):
        return composed_attention(q, k, v, pre, post, is_causal=True, window=20)

    compiled = torch.compile(step, fullgraph=True, backend=count)
    for T in (17, 30, 31, 40, 55, 64, 65, 80, 99, 128, 129, 150):
        inputs = make_inputs(T=T)
        out = compiled(*inputs.call())
        torch.testing.assert_close(out, step(*inputs.call()))
        grads = [torch.autograd.grad(o.square().sum(), inputs.floats()) for o in (out, step(*inputs.call()))]
        torch.testing.assert_close(*grads)
    assert len(graphs) <= 2


def test_compile_inductor():
    torch._dynamo.reset()
    inputs = make_inputs(T=40)
    step = torch.compile(lambda *a: composed_attention(*a, is_causal=True) * 2, fullgraph=True)
    out, expected = step(*inputs.call()), composed_attention(*inputs.call(), is_causal=True) * 2
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), inputs.floats()) for o in (out, expected)))


def test_autocast_checkpoint_dropout():
    """bf16 autocast with checkpointing and dropout: the recomputation draws the same mask."""
    inputs = make_inputs(T=40)

    def attend(*arguments):
        return composed_attention(*arguments, is_causal=True, dropout_p=0.3)

    def run(call):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            out = call(*inputs.call())
        assert out.dtype == torch.bfloat16
        return out, torch.autograd.grad(out.float().square().sum(), inputs.floats())

    torch.testing.assert_close(run(lambda *a: checkpoint(attend, *a, use_reentrant=False)), run(attend))


@pytest.mark.parametrize("backend", [*MIXERS, "reference"])
def test_autocast_casts_everything(backend):
    inputs = make_inputs(T=20, mask="float")
    with torch.autocast("cpu", torch.bfloat16):
        out = composed_attention(*inputs.call(), attn_mask=inputs.attn_mask, backend=backend)
    lowered = inputs.to(torch.bfloat16)
    assert torch.equal(out, composed_attention(*lowered.call(), attn_mask=lowered.attn_mask, backend=backend))
    grads = torch.autograd.grad(out.sum(), inputs.floats())
    assert all(g.dtype == torch.float32 for g in grads)


@pytest.mark.parametrize("backend", [*MIXERS, "reference"])
def test_dropout(backend):
    """Weights are dropped at the asked rate and the rest scaled; 0 drops nothing, 1 everything; one seed, one mask."""
    inputs = make_inputs(B=2, N=8, T=128, D=128)
    value = torch.eye(128).expand(2, 8, 128, 128)
    arguments = (*inputs.call()[:2], value, *inputs.call()[3:])
    weights = composed_attention(*arguments, backend=backend)
    dropped = composed_attention(*arguments, dropout_p=0.25, backend=backend)
    kept = dropped != 0
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert bool((composed_attention(*arguments, dropout_p=1.0, backend=backend) == 0).all())
    torch.manual_seed(1)
    first = composed_attention(*arguments, dropout_p=0.25, backend=backend)
    assert bool((first != dropped).any())
    torch.manual_seed(1)
    assert torch.equal(first, composed_attention(*arguments, dropout_p=0.25, backend=backend))


@pytest.mark.parametrize("backend", list(MIXERS))
def test_dropout_gradients(backend):
    """With the mask that the forward drew, read off an identity value, the gradients are those of the masked weights."""
    inputs = make_inputs(T=16, D=16)
    torch.manual_seed(2)
    q, k, _, pre, post = inputs.call()
    factor = (
        composed_attention(q, k, torch.eye(16).expand(1, 4, 16, 16), pre, post, dropout_p=0.4, backend=backend) != 0
    ) / 0.6
    torch.manual_seed(2)
    out = composed_attention(*inputs.call(), dropout_p=0.4, backend=backend)
    expected = (composed_weights(q, k, pre, post) * factor) @ inputs.value
    grad = torch.randn_like(out)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    actual, wanted = (torch.autograd.grad(o, inputs.floats(), grad) for o in (out, expected))
    torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4)


def test_composed_weights():
    inputs = make_inputs(B=2, K=2, T=20, mask="float")
    weights = composed_weights(*inputs.call()[:2], *inputs.call()[3:], attn_mask=inputs.attn_mask, is_causal=True, window=4)
    out = composed_attention(*inputs.call(), attn_mask=inputs.attn_mask, is_causal=True, window=4)
    torch.testing.assert_close(weights @ inputs.value.repeat_interleave(2, 1), out)


def test_only_what_needs_gradients():
    inputs = make_inputs(T=9, mask="float")
    frozen = [t.detach() for t in inputs.call()[:3]]
    out = composed_attention(*frozen, inputs.pre, None, attn_mask=inputs.attn_mask.detach())
    (grad,) = torch.autograd.grad(out.sum(), [inputs.pre.query])
    assert grad.abs().sum() > 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_is_linear():
    """In a fresh process: T=8192 in a window peaks far below the scores of all heads. benchmarks/ measures full attention."""
    code = """
import torch
from pathlib import Path
from dcformer.testing import make_inputs
from dcformer import composed_attention
torch.set_num_threads(1)
inputs = make_inputs(N=8, T=8192, D=32, parts="qk")
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
composed_attention(*inputs.call(), is_causal=True, window=64, backend="chunked").sum().backward()
print((peak() - before) / 1024)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 250  # MiB; the scores of all heads would be 2048


@pytest.mark.parametrize("window", [1, 50, 300])
def test_windows_cost_what_they_see(window):
    """The pairs that the blocks cover grow with T W, not T^2, and are at most twice those seen, or a device's least."""

    def pairs(T, device):
        q = torch.empty(1, 8, T, 4, device=device)
        call = Call(q, q, q, None, None, None, None, True, window, 1.0, 0.0)
        return sum((s.b.stop - s.b.start) * (s.t.stop - s.t.start) * (s.s.stop - s.s.start) for s in _spans(call))

    for T in 4096, 8192:
        assert pairs(T, "cpu") <= T * (window + max(window, _CPU_MIN_QUERIES))
        assert pairs(T, "meta") <= T * (window + max(window, _GPU_MIN_QUERIES))


def test_import_without_extras():
    """The operator imports neither transformers nor Triton nor a compiler, and works where they are missing."""
    code = """
import sys
for name in ("triton", "transformers", "numpy", "typer"):
    sys.modules[name] = None
import torch
from dcformer import composed_attention
x = torch.randn(1, 2, 5, 8)
assert composed_attention(x, x, x, backend="chunked").shape == x.shape
"""
    subprocess.run([sys.executable, "-c", code], check=True)
