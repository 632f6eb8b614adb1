"""DCPythia: a GPT-NeoX-style decoder (LayerNorm, biases, parallel residual, partial rotary embeddings) with composed heads.

B batch, T length, E hidden size. Attention and the forward passes are in `dcformer.models.decoder`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

from dcformer.models.dcpythia.configuration_dcpythia import DCPythiaConfig
from dcformer.models.decoder import ComposedAttention, Decoder, DecoderForCausalLM, DecoderPreTrainedModel


class DCPythiaMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, config: DCPythiaConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.use_linear_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.use_linear_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, E] to [B, T, E]."""
        return self.down_proj(F.gelu(self.up_proj(hidden)))


class DCPythiaLayer(GradientCheckpointingLayer):
    """Attention and MLP, each with a norm before, side by side or one after the other."""

    def __init__(self, config: DCPythiaConfig, layer_idx: int):
        super().__init__()
        self.parallel = config.use_parallel_residual
        self.self_attn = ComposedAttention(config, layer_idx, bias=config.use_linear_bias)
        self.mlp = DCPythiaMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """[B, T, E] to [B, T, E]; `kwargs` are those of `ComposedAttention`."""
        attended = hidden + self.self_attn(self.input_layernorm(hidden), **kwargs)[0]
        return attended + self.mlp(self.post_attention_layernorm(hidden if self.parallel else attended))


class DCPythiaPreTrainedModel(DecoderPreTrainedModel):
    """What transformers wants to know of DCPythia."""

    config_class = DCPythiaConfig
    _no_split_modules = ["DCPythiaLayer"]  # noqa: RUF012


class DCPythiaModel(DCPythiaPreTrainedModel, Decoder):
    """The decoder without an output layer."""

    def __init__(self, config: DCPythiaConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(DCPythiaLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()


class DCPythiaForCausalLM(DCPythiaPreTrainedModel, DecoderForCausalLM):
    """DCPythia that predicts the next token."""

    def __init__(self, config: DCPythiaConfig):
        super().__init__(config)
        self.model = DCPythiaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoModel.register(DCPythiaConfig, DCPythiaModel)
AutoModelForCausalLM.register(DCPythiaConfig, DCPythiaForCausalLM)
