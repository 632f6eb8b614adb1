from collections.abc import Callable

import pytest
import torch

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "qk_norm": True,
    "window_pattern": "LG",
    "sliding_window": 8,
}


@pytest.fixture
def make() -> Callable[..., DCFormerForCausalLM | DCPythiaForCausalLM]:
    """Small models whose composition is loud: as training initialises it, it would hide mistakes below the tolerance."""

    kinds = {"dcformer": (DCFormerConfig, DCFormerForCausalLM), "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM)}

    def build(kind: str = "dcformer", **overrides: object) -> DCFormerForCausalLM | DCPythiaForCausalLM:
        config, causal_lm = kinds[kind]
        model = causal_lm(config(**{**SHAPE, **overrides})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".compose." in name:
                    parameter.normal_(0, 0.1)
                elif name.endswith("proj.weight"):
                    parameter.mul_(3)
        return model

    return build


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Random token ids of a given shape."""
    return lambda *shape: torch.randint(1, VOCAB, shape)
