import pytest

from dcformer import DCFormerConfig, DCPythiaConfig
from dcformer.models.counts import count_parameters

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96}
L, G = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("pattern", "layers", "expected"),
    [
        ("G", 3, [G, G, G]),
        ("L", 2, [L, L]),
        ("LG", 5, [L, G, L, G, L]),
        ("LGLL", 6, [L, G, L, L, L, G]),
        ("LGL6", 9, [L, G, L, L, L, L, L, L, L]),
        ("L2G", 7, [L, L, G, L, L, G, L]),
        (["L", "G", "G"], 4, [L, G, G, L]),
        (["L2", "G"], 4, [L, L, G, L]),
    ],
)
def test_window_pattern_repeats_over_the_layers(pattern, layers, expected):
    config = DCFormerConfig(**{**SMALL, "num_hidden_layers": layers}, window_pattern=pattern, sliding_window=16)
    assert config.layer_types == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_attention_heads": 5}, "num_attention_heads=5 must divide hidden_size=64"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"mgate_dim": 7}, "mgate_dim=7 must divide intermediate_size=96"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number"),
        ({"vocab_size": -1}, "vocab_size=-1 must be a whole number"),
        ({"attention_dropout": 1.5}, "attention_dropout=1.5"),
        ({"window_pattern": "LG", "sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"window_pattern": "LG"}, "give their sliding_window"),
        ({"window_pattern": "XG", "sliding_window": 8}, "window_pattern='XG' is unknown"),
        ({"window_pattern": "LG0", "sliding_window": 8}, "window_pattern='LG0' is unknown"),
        ({"window_pattern": "", "sliding_window": 8}, "window_pattern='' is unknown"),
        ({"window_pattern": ["L", "x"], "sliding_window": 8}, "is unknown"),
        ({"window_pattern": None}, "window_pattern=None is unknown"),
        ({"window_pattern": "LG", "sliding_window": 8, "layer_types": [G, G, G, G]}, "leave layer_types out"),
        ({"compose": {"ranks": 2}}, "unknown option 'ranks'; known are rank"),
        ({"compose": {"device": "cpu"}}, "unknown option 'device'"),
        ({"compose": {"rank": "2"}}, "rank='2'; it must be of type int"),
        ({"compose": {"groups": 3}}, "groups=3 must divide num_heads=4"),
        ({"compose": {"rank": -1}}, "rank=-1"),
        ({"compose": "yes"}, "compose='yes' must be a dict"),
        ({"hidden_dim": 64, "n_head": 4}, r"unknown configuration keys \['hidden_dim', 'n_head'\]"),
    ],
)
def test_bad_values_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        DCFormerConfig(**{**SMALL, **overrides})


def test_keys_that_transformers_writes_are_no_error():
    written = {
        "model_type": "dcformer",
        "architectures": ["DCFormerForCausalLM"],
        "torch_dtype": "bfloat16",
        "transformers_version": "4.33.2",
        "auto_map": {"AutoConfig": "configuration_dcformer.DCFormerConfig"},
        "rope_theta": 5000.0,
        "output_attentions": False,
        "is_decoder": True,
        "layer_types": [G] * 4,
        "temperature": 0.7,
        "id2label": {0: "a", 1: "b"},
        "name_or_path": "somewhere",
        "attn_implementation": "eager",
    }
    config = DCFormerConfig(**SMALL, **written)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config._attn_implementation == "eager"
    assert "auto_map" not in config.to_dict()  # it names remote code, which is never run


@pytest.mark.parametrize("compose", [{}, {"rank": 1, "gates": False}, None])
def test_saved_configuration_comes_back(compose, tmp_path):
    config = DCFormerConfig(**SMALL, compose=compose, window_pattern="LGL6", sliding_window=8, rope_theta=5000.0)
    config.save_pretrained(tmp_path)
    assert DCFormerConfig.from_pretrained(tmp_path).to_dict() == {**config.to_dict(), "architectures": None}


def test_fewer_layers_keep_the_pattern(tmp_path):
    DCFormerConfig(**SMALL, window_pattern="LGL6", sliding_window=8).save_pretrained(tmp_path)
    config = DCFormerConfig.from_pretrained(tmp_path, num_hidden_layers=2)
    assert config.layer_types == [L, G]
    config.num_hidden_layers = 3
    assert config.layer_types == [L, G, L]


def test_defaults_of_composition_are_the_papers():
    compose = DCFormerConfig(**SMALL).compose
    assert (compose["rank"], compose["groups"]) == (2, 1)
    assert compose["query_wise"] and compose["key_wise"] and compose["gates"] and compose["pre"] and compose["post"]


@pytest.mark.parametrize(("name", "millions"), [("405M", 405), ("834M", 834), ("1.4B", 1400), ("2.8B", 2800), ("6.9B", 6900)])
def test_sizes_of_the_paper_hold_what_they_are_named_after(name, millions):
    counts = count_parameters(DCFormerConfig.from_size(name, compose=None))
    assert counts.total == pytest.approx(millions * 1e6, rel=0.02)


@pytest.mark.parametrize(("name", "millions"), [("1M", 1), ("3M", 3), ("10M", 10), ("25M", 25)])
def test_small_sizes_are_named_after_their_parameters_without_embeddings(name, millions):
    counts = count_parameters(DCFormerConfig.from_size(name))
    assert counts.total - counts.embeddings == pytest.approx(millions * 1e6, rel=0.07)


@pytest.mark.parametrize(("name", "millions"), [("2.8B", 2775), ("6.9B", 6857)])  # those of Pythia, Biderman et al. 2023
def test_sizes_of_dcpythia_are_those_of_pythia(name, millions):
    counts = count_parameters(DCPythiaConfig.from_size(name, compose=None, qk_norm=False))
    assert counts.total == pytest.approx(millions * 1e6, rel=1e-3)


def test_dcpythia_rotates_a_quarter_of_each_head_unless_told(tmp_path):
    assert DCPythiaConfig(**SMALL).rope_parameters["partial_rotary_factor"] == 0.25
    half = DCPythiaConfig(**SMALL, rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
    assert half.rope_parameters["partial_rotary_factor"] == 0.5
    half.save_pretrained(tmp_path)
    assert DCPythiaConfig.from_pretrained(tmp_path).rope_parameters == half.rope_parameters
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.25 rotates 3 of head_dim=12 channels"):
        DCPythiaConfig(**{**SMALL, "head_dim": 12})


def test_size_takes_overrides_and_names_what_it_knows():
    config = DCFormerConfig.from_size("2.8B", num_hidden_layers=2, vocab_size=100)
    assert (config.num_hidden_layers, config.vocab_size, config.head_dim) == (2, 100, 80)
    with pytest.raises(ValueError, match=r"size '7B' is unknown; choose one of 1M, .*6\.9B"):
        DCFormerConfig.from_size("7B")
