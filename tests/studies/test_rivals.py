import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from dcformer.models.counts import count_parameters
from dcformer.models.dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.studies.rivals import DifferentialConfig, GatedConfig
from dcformer.studies.runs import describe

SHAPE = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3,
}  # fmt: skip
RIVALS = [(GatedConfig, {}), (GatedConfig, {"gate_channels": True}), (DifferentialConfig, {})]
EACH = pytest.mark.parametrize(("kind", "changes"), RIVALS, ids=["gate a head", "gate a channel", "differential"])


def rotated(x, positions):
    """Rotary embedding by complex numbers: channel i is the real part, i + D/2 the imaginary part."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def by_hand(attention, hidden, combine):
    """Attention of one row [T, E], head by head, as the papers' equations read."""
    T, D = len(hidden), attention.head_dim
    project = [(hidden @ p.weight.T).split(D, -1) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    positions, maps = torch.arange(T, dtype=torch.float32), []
    for q, k in zip(project[0], project[1], strict=True):
        scores = rotated(q, positions) @ rotated(k, positions).T / math.sqrt(D)
        maps.append(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1))
    return torch.cat(combine(maps, project[2]), -1) @ attention.o_proj.weight.T


@EACH
def test_attention_is_the_papers(kind, changes):
    model = AutoModelForCausalLM.from_config(kind(**SHAPE, **changes))
    layer = 1
    attention, hidden = model.model.layers[layer].self_attn, torch.randn(1, 7, 24)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)

    def gated(maps, values):
        gates = torch.sigmoid(hidden[0] @ attention.gate_proj.weight.T).chunk(4, -1)
        return [g * (m @ v) for g, m, v in zip(gates, maps, values, strict=True)]

    def differential(maps, values):
        lq1, lk1, lq2, lk2 = attention.lambdas
        initial = 0.8 - 0.6 * math.exp(-0.3 * layer)
        weight = math.exp(lq1 @ lk1) - math.exp(lq2 @ lk2) + initial
        outs = []
        for i in (0, 2):
            out = (maps[i] - weight * maps[i + 1]) @ torch.cat(values[i : i + 2], -1)
            out = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.norm.weight
            outs.append((1 - initial) * out)
        return outs

    with torch.no_grad():
        found, _ = attention(hidden, model.model.rotary_emb(hidden, torch.arange(7)[None]))
        expected = by_hand(attention, hidden[0], differential if kind is DifferentialConfig else gated)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


@EACH
def test_parameters_and_flops_are_those_of_the_model(kind, changes):
    config, plain = kind(**SHAPE, **changes), DCFormerConfig(**SHAPE, compose=None)
    models = [AutoModelForCausalLM.from_config(c, attn_implementation="eager") for c in (config, plain)]
    assert type(models[0]) is not DCFormerForCausalLM
    about = describe(config, 1)
    assert about["parameters"] == sum(p.numel() for p in models[0].parameters())
    assert config.more_parameters() == about["parameters"] - count_parameters(plain).total
    counted = []
    for model in models:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.long), use_cache=False)
        counted.append(counter.get_total_flops())
    padding = 2 * 2 * 24 if kind is DifferentialConfig else 0  # zeros behind queries and keys, which only our kernels want
    assert config.more_flops(1) == counted[0] - counted[1] - padding
    assert about["flops_per_token"] == 3 * (counted[0] - padding)


@EACH
def test_saved_and_loaded_it_is_the_same(kind, changes, tmp_path):
    model, ids = AutoModelForCausalLM.from_config(kind(**SHAPE, **changes)).eval(), torch.randint(50, (2, 9))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
        assert torch.equal(model(ids[:, :5]).logits, model(ids).logits[:, :5]) or torch.allclose(
            model(ids[:, :5]).logits, model(ids).logits[:, :5], atol=1e-5
        )


def test_weights_begin_as_the_transformers():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DifferentialConfig(**{**SHAPE, "hidden_size": 256, "num_attention_heads": 8}))
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.std().item() == pytest.approx(0.3, rel=0.02)
    assert attention.lambdas.std().item() == pytest.approx(0.1, rel=0.3)
    assert torch.equal(attention.norm.weight, torch.ones(64))


def test_bad_input():
    with pytest.raises(ValueError, match=r"num_attention_heads=3 must be even"):
        AutoModelForCausalLM.from_config(DifferentialConfig(**{**SHAPE, "num_attention_heads": 3}))
    model = AutoModelForCausalLM.from_config(GatedConfig(**SHAPE))
    with pytest.raises(ValueError, match=r"cache must be None"):
        model(torch.zeros(1, 3, dtype=torch.long), use_cache=True)
