"""Taking over, saving, precision, compiling, dropout and bad input of `DCMHA`."""

import copy
import io
import math

import pytest
import torch
from by_hand import EXACT, name, randomize
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from dcformer import DCMHA


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
