"""Plain PyTorch: every `nn.MultiheadAttention` inside becomes a `DCMHA`, and back."""

import copy
import subprocess
import sys

import pytest
import torch
from small_models import loud, make
from torch import nn

import dcformer


def transformer(**options):
    return nn.Transformer(32, 4, 1, 2, 48, dropout=0.0, batch_first=True, **options).eval()


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer(norm_first):
    model = transformer(norm_first=norm_first)
    source, target = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    padding = torch.arange(7) >= torch.tensor([[7], [4]])
    given = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(5),
        "tgt_is_causal": True,
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
    }
    before, state = model(source, target, **given), copy.deepcopy(model.state_dict())
    assert dcformer.convert(model, trainable="composition") is model
    assert sum(isinstance(module, dcformer.DCMHA) for module in model.modules()) == 5
    assert all(p.requires_grad == (".compose." in name) for name, p in model.named_parameters())
    torch.testing.assert_close(model(source, target, **given), before, atol=2e-5, rtol=2e-5)
    loud(model)
    changed = model(source, target, **given)
    assert (changed - before).abs().max() > 1e-3
    with torch.no_grad():  # where PyTorch's layers have a fast path that reads the projections and attends by itself
        torch.testing.assert_close(model(source, target, **given), changed, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match="already"):
        dcformer.convert(model)
    dcformer.unconvert(model)
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in state.items()}
    torch.testing.assert_close(model(source, target, **given), before, atol=2e-6, rtol=2e-6)


class Block(nn.Module):
    """A block as CLIP's and torchvision's vision transformers have it, lengths first."""

    def __init__(self):
        super().__init__()
        self.attn, self.ln = nn.MultiheadAttention(32, 4), nn.LayerNorm(32)

    def forward(self, x):
        y = self.ln(x)
        return x + self.attn(y, y, y, need_weights=False, attn_mask=None)[0]


def test_blocks_of_ones_own():
    shared = Block()
    model, x = nn.Sequential(Block(), shared, shared), torch.randn(7, 2, 32)
    before = model(x)
    dcformer.convert(model, layers=["1", "2"], static=True)
    assert [isinstance(block.attn, dcformer.DCMHA) for block in model] == [False, True, True]
    assert model[1].attn is model[2].attn
    torch.testing.assert_close(model(x), before, atol=2e-5, rtol=2e-5)
    weights = torch.randn_like(before)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) * weights).sum().backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if torch.equal(p, start[name])]


def test_wrong_use():
    with pytest.raises(ValueError, match="from_mha"):
        dcformer.convert(nn.MultiheadAttention(32, 4))
    with pytest.raises(ValueError, match=r"no nn.MultiheadAttention"):
        dcformer.convert(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="rank=5 is over the 4 heads"):
        dcformer.convert(transformer(), rank=5)
    with pytest.raises(ValueError, match="no attention at 'nowhere'"):
        dcformer.convert(transformer(), layers=["nowhere"])
    with pytest.raises(ValueError, match="is not converted"):
        dcformer.unconvert(transformer())
    with pytest.raises(ValueError, match="convert that one, '1'"):
        dcformer.convert(nn.Sequential(nn.Linear(3, 3), make("bert")))
    own = nn.Sequential(dcformer.DCMHA(32, 4, window=3))
    with pytest.raises(ValueError, match="0 has a window"):
        dcformer.unconvert(own)


def test_needs_no_transformers():
    code = (
        "import sys, torch, dcformer; dcformer.convert(torch.nn.Transformer(32, 4)); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
