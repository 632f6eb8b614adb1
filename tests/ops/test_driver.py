"""What the driver asks of a GPU, on tensors without data: how it cuts blocks, and that a CUDA graph can record it."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcformer.ops import driver
from dcformer.ops.composition import Composition
from dcformer.ops.mixers import Call
from dcformer.ops.mixers.chunked import ChunkedMixer

MIB = 1 << 20


class Recorded(TorchDispatchMode):
    """Fails where the host would read from the device or copy to it; counts products of half precision into float32."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a number"
        if func is torch.ops.aten.baddbmm.dtype_out:  # only GPUs have it
            out, a, b, dtype = args
            assert out is kwargs["out"] and out.dtype == dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16
            assert out.shape == (a.shape[0], a.shape[1], b.shape[2]) and a.shape[2] == b.shape[1]
            self.products += 1
            return out
        result = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs or {}, result)) if isinstance(t, torch.Tensor)}
        assert devices <= {"meta"}, f"{func} is on {devices}"
        return result


def make_call(B=2, N=8, T=512, S=512, D=64, window=None, dtype=torch.bfloat16):
    def side():
        query, key = (torch.empty(B, length, 5, N, device="meta", dtype=dtype) for length in (T, S))
        return Composition(None, query, key)

    q, k, v = (torch.empty(B, N, length, D, device="meta", dtype=dtype) for length in (T, S, S))
    return Call(q, k, v, side(), side(), None, None, True, window, 0.125, 0.0)


@pytest.mark.parametrize(("T", "window"), [(512, None), (512, 100), (1, None)])
def test_a_cuda_graph_can_record_it(monkeypatch, T, window):
    monkeypatch.setattr(torch, "tensor", None)  # it copies from the host, which `Recorded` does not see
    monkeypatch.setattr(driver, "_sums_in_float32", lambda device: True)
    monkeypatch.setattr(driver, "_GPU_BLOCK", 1 << 18)  # several blocks
    with Recorded() as recorded:
        call = make_call(T=T, window=window)
        out, statistics = ChunkedMixer().forward(call)
        grads = ChunkedMixer().backward(call, torch.empty_like(out), statistics, False)
    blocks = 1 if T == 1 else len(list(driver._spans(call)))
    assert T == 1 or blocks > 1
    assert recorded.products == blocks * (1 + 4)  # scores; scores, dweights, dkey and dvalue
    assert out.shape == call.query.shape and len(grads) == 7


@pytest.mark.parametrize("B", [1, 3, 64])
@pytest.mark.parametrize("T", [64, 1000, 16384])
@pytest.mark.parametrize("window", [None, 256])
def test_blocks_of_a_gpu(B, T, window):
    """Enough queries for the products, no more scores than planned, each query once."""
    spans = list(driver._spans(make_call(B, 32, T, T, 1, window)))
    seen = torch.zeros(B, T)
    for span in spans:
        seen[span.b, span.t] += 1
        rows, queries, keys = (s.stop - s.start for s in (span.b, span.t, span.s))
        assert queries >= min(T, 64) or span.t.stop == T
        assert rows * 32 * queries * keys <= max(driver._GPU_BLOCK, 32 * 64 * keys)
        assert window is None or keys < queries + window
    assert bool((seen == 1).all())
    if T <= 1000 and B <= 3 and window is None:
        assert len(spans) <= 1 + B * 32 * T * T // driver._GPU_BLOCK  # all of the batch in one


def test_a_large_cache_takes_larger_blocks(monkeypatch):
    def scores(megabytes):
        properties = SimpleNamespace(L2_cache_size=megabytes << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return driver._block_size(torch.device("cuda"), 1)[0]

    assert scores(50) == scores(100) == driver._GPU_BLOCK
    assert scores(1024) == (1024 << 20) // 6
