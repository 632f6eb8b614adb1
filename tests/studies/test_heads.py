import json
import math

import pytest
import torch

from dcformer import Composition, DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.models.attention import AttentionInputs
from dcformer.ops.reference import compose, visible_keys
from dcformer.studies.analyze import _measure, _strongest, _summarize
from dcformer.studies.heads import attention_inputs, check_has_heads, maps, mixing

SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def loud(kind="dcformer", **changes):
    """A model whose composition shows."""
    config, causal_lm = {
        "dcformer": (DCFormerConfig, DCFormerForCausalLM),
        "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM),
    }[kind]
    model = causal_lm(config(**SHAPE | {"initializer_range": 0.3} | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compose." in name:
                parameter.normal_(0, 0.2)
    return model


def composition(T, N=4, rank=2, **parts):
    """A random one, `query` and `key` by default."""
    return Composition(**{"query": torch.randn(1, T, 2 * rank + 1, N), "key": torch.randn(1, T, 2 * rank + 1, N)} | parts)


def inputs(T=24, N=4, pre=None, post=None, window=None):
    query, key = torch.randn(2, 1, N, T, 8)
    pre, post = (Composition() if c is None else c for c in (pre, post))
    return AttentionInputs(query, key, pre, post, None, {"is_causal": True, "window": window})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dcformer", {}),
        ("dcformer", {"compose": {"static": True, "groups": 2, "key_wise": False}, "num_key_value_heads": 2}),
        ("dcformer", {"compose": {"rank": 1, "pre": False}, "window_pattern": "LG", "sliding_window": 5}),
        ("dcpythia", {"qk_norm": True}),
        ("dcpythia", {"compose": None}),
        ("dcformer", {"compose": None, "window_pattern": "LG", "sliding_window": 5}),
    ],
)
def test_maps_are_what_the_model_computes(kind, changes):
    model, ids = loud(kind, **changes), torch.randint(50, (2, 17))
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    layers = attention_inputs(model, ids)
    assert len(layers) == 3
    for layer, attention in zip(layers, expected, strict=True):
        found = maps(layer)
        torch.testing.assert_close(found.composed, attention)
        torch.testing.assert_close(found.raw.sum(-1), torch.ones(2, 4, 17))
        assert (found.raw[~found.visible.expand_as(found.raw)] == 0).all()
        assert model.config.compose or torch.equal(found.composed, found.raw)
    window = 5 if "window_pattern" in changes else None
    assert torch.equal(maps(layers[0]).visible[0, 0], visible_keys(17, 17, True, window))


@pytest.mark.parametrize("parts", [{}, {"query": None}, {"key": None}, {"base": torch.randn(2, 2, 2), "groups": 2}])
def test_mixing_as_matrices_is_the_composition(parts):
    given = composition(9, **parts)
    x, found = torch.randn(1, 4, 9, 9), mixing(given, 1, 9, 4)
    mixed = torch.einsum("bnts,nm->bmts", x, found.base)
    mixed += torch.einsum("bnts,btnm->bmts", x, found.query) + torch.einsum("bnts,bsnm->bmts", x, found.key)
    torch.testing.assert_close(x + mixed, compose(x, given), rtol=1e-4, atol=1e-4)


def test_other_models_and_unknown_tokens_are_refused():
    with pytest.raises(ValueError, match=r"the checkpoint is a Linear; only the heads of DCFormer and DCPythia"):
        check_has_heads(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="token 50 is not in the model's vocabulary of 50"):
        attention_inputs(loud(), torch.tensor([[3, 50]]))


def test_heads_that_are_the_same_are_fully_similar_and_spread_heads_have_their_entropy():
    given = inputs()
    same = given._replace(query=given.query[:, :1].expand(-1, 4, -1, -1), key=given.key[:, :1].expand(-1, 4, -1, -1))
    found = _measure(same)
    torch.testing.assert_close(found["similarity/raw"], torch.ones(4, 4))
    flat = _measure(given._replace(query=torch.zeros_like(given.query)))
    expected = sum(math.log(keys) for keys in range(8, 25)) / 17  # queries with fewer than 8 keys are left out
    torch.testing.assert_close(flat["entropy/raw"], torch.full((4,), expected))


def test_effective_rank_counts_equal_directions():
    given = inputs(T=24)
    few = torch.zeros(1, 4, 24, 8)
    few[..., :3] = torch.linalg.qr(torch.randn(24, 3)).Q  # scores with three equal singular values
    found = _measure(given._replace(query=few, key=few))
    torch.testing.assert_close(found["effective_rank/raw"], torch.full((4,), 3.0), rtol=1e-3, atol=1e-3)
    mixed = _measure(inputs(pre=composition(24)))
    assert (mixed["effective_rank/raw"] < 8.01).all() and (mixed["effective_rank/composed"] > 9).all()  # no more than D without


def test_the_variance_of_a_gate_is_reckoned_by_hand():
    gates = torch.zeros(1, 24, 5, 4)
    gates[:, :, -1] = 0.5  # every head is scaled by 1.5
    found = _measure(inputs(post=Composition(query=gates)))
    shares = {name.rpartition("/")[2]: value.item() for name, value in found.items() if name.startswith("variance/weights")}
    assert shares == pytest.approx({"dynamic": 1 / 9, "query": 0, "query_gate": 1 / 9}, abs=1e-5)
    assert not any(name.startswith("variance/scores") for name in found)
    torch.testing.assert_close(found["mixing/weights/query/norm"], torch.full((24,), 1.0))  # 0.5 on a diagonal of 4
    torch.testing.assert_close(found["mixing/weights/query/constant"], torch.tensor(1.0))


def test_a_layer_that_mixes_nothing_yet_adds_nothing():
    nothing = Composition(query=torch.zeros(1, 24, 5, 4), key=torch.zeros(1, 24, 5, 4))
    found = _measure(inputs(pre=nothing, post=nothing, window=1))
    assert all(torch.isfinite(value).all() for value in found.values())
    assert found["variance/scores/dynamic"] == found["variance/weights/dynamic"] == 0


def test_strongest_tokens_are_averaged_and_rare_ones_left_out():
    ids = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 0, 1, 0], [0, 1, 3, 1, 1]])
    norms = torch.tensor([[1.0, 2, 3, 2, 99], [2, 2, 2, 2, 2], [2, 2, 99, 2, 2]])
    assert _strongest(norms, ids, ["a", "b", "c", "d"]) == [
        {"token": "a", "norm": 2.0, "count": 6},
        {"token": "b", "norm": 2.0, "count": 7},
    ]


def test_one_head_and_plain_layers_have_a_report_too():
    given = AttentionInputs(*torch.randn(2, 1, 1, 24, 8), Composition(), Composition(), None, {"is_causal": True})
    found = _summarize([_measure(given)], torch.zeros(1, 24, dtype=torch.long), ["a"])
    assert found["similarity"]["raw"]["mean"] is None and found["variance"] is None and found["mixing"] is None
    json.dumps(found, allow_nan=False)
