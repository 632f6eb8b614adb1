import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dcformer import Compose, DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.models.counts import count_flops, count_parameters

SMALL = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
ABLATIONS = [
    None,
    {},
    {"rank": 3, "groups": 2},
    {"static": True},
    {"gates": False},
    {"query_wise": False},
    {"key_wise": False},
    {"pre": False, "static": True, "groups": 3},
    {"post": False},
    {"rank": 0},
    {"rank": 0, "gates": False, "static": True},
]


@pytest.mark.parametrize("compose", ABLATIONS, ids=str)
@pytest.mark.parametrize(
    "other", [{}, {"tie_word_embeddings": True, "qk_norm": True, "head_dim": 10, "mgate_dim": 4}], ids=["plain", "other"]
)
def test_parameters_are_those_of_the_model(compose, other):
    config = DCFormerConfig(**SMALL, **other, compose=compose)
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    counts = count_parameters(config)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert counts.composition == sum(p.numel() for name, p in model.named_parameters() if ".compose." in name)
    plain = count_parameters(DCFormerConfig(**SMALL, **other, compose=None)).total
    assert counts.composition_share == pytest.approx((counts.total - plain) / plain)


@pytest.mark.parametrize(
    "other", [{}, {"use_linear_bias": False, "head_dim": 16, "tie_word_embeddings": True}], ids=["plain", "other"]
)
def test_dcpythia_has_norms_and_biases_of_its_own(other):
    config = DCPythiaConfig(**SMALL, **other)
    with torch.device("meta"):
        model = DCPythiaForCausalLM(config)
    counts, shapes = count_parameters(config), {name: p.numel() for name, p in model.named_parameters()}
    assert counts.total == sum(shapes.values())
    assert counts.mlp == sum(size for name, size in shapes.items() if ".mlp." in name)
    assert counts.norms == sum(size for name, size in shapes.items() if "norm" in name)
    flops = count_flops(config, 1)
    assert flops.mlp == 2 * sum(size for name, size in shapes.items() if ".mlp." in name and name.endswith("weight"))


@pytest.mark.parametrize(("length", "window"), [(1, 4), (4, 4), (13, 4), (13, 64)])
def test_plain_flops_are_those_that_torch_counts_but_for_what_no_query_sees(length, window):
    config = DCFormerConfig(**SMALL, compose=None, window_pattern="LG", sliding_window=window)
    model = DCFormerForCausalLM(config)
    model.set_attn_implementation("eager")  # torch's counter does not know its own fused attention on the CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    pairs = {None: sum(range(1, length + 1)), window: sum(min(i, window) for i in range(1, length + 1))}
    unseen = sum(length**2 - pairs[w] for w in (window, None, window))
    hidden = unseen * 4 * config.num_attention_heads * config.head_dim
    assert count_flops(config, length).total * length == pytest.approx(counter.get_total_flops() - hidden)


@pytest.mark.parametrize(
    "compose", [{}, {"rank": 3, "groups": 2}, {"post": False, "gates": False}, {"key_wise": False}], ids=str
)
def test_flops_of_making_the_weights_are_those_that_torch_counts(compose):
    module = Compose(48, 6, **compose)
    with FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 1, 48))
    config = DCFormerConfig(**SMALL, compose=compose)
    options, layers = config.compose, config.num_hidden_layers
    parts, sides = options["query_wise"] + options["key_wise"], options["pre"] + options["post"]
    per_head = 2 * options["rank"] + options["gates"]
    mixing = 2 * 6 * per_head * parts * sides  # one query, one key
    assert count_flops(config, 1).composition == layers * (counter.get_total_flops() + mixing)


def test_windows_and_composition_change_only_their_own_share():
    plain, composed = (
        count_flops(DCFormerConfig(**SMALL, compose=c, window_pattern="L", sliding_window=10), 1000) for c in (None, {})
    )
    assert plain.composition_share == 0
    assert composed.total - composed.composition == pytest.approx(plain.total)
    everywhere = count_flops(DCFormerConfig(**SMALL, compose=None), 1000)
    assert everywhere.products / plain.products == pytest.approx(500.5 / (10 * 1000 - 45) * 1000)


def test_length_must_be_positive():
    with pytest.raises(ValueError, match="length=0"):
        count_flops(DCFormerConfig(**SMALL), 0)
