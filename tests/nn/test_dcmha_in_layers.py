"""`DCMHA` in the place of `nn.MultiheadAttention` inside torch's own layers, in training and evaluation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from by_hand import EXACT, double
from torch import nn

from dcformer import DCMHA


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
