"""DCFormer: a LLaMA-style decoder (RMSNorm, rotary embeddings, SwiGLU) whose attention heads are composed.

B batch, T length, E hidden size. Attention and the forward passes are in `dcformer.models.decoder`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dcformer.models.dcformer.configuration_dcformer import DCFormerConfig
from dcformer.models.decoder import ComposedAttention, Decoder, DecoderForCausalLM, DecoderPreTrainedModel


class DCFormerMLP(nn.Module):
    """SwiGLU, down(silu(gate(x)) * up(x)); with `mgate_dim` gates softmax(mgate(x)) each scale a slice of the product."""

    def __init__(self, config: DCFormerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        gates = config.mgate_dim
        self.mgate = nn.Linear(config.hidden_size, gates, bias=False) if gates is not None else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, E] to [B, T, E]."""
        inner = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        if self.mgate is not None:
            gates = F.softmax(self.mgate(hidden), dim=-1, dtype=torch.float32).to(inner.dtype)
            inner = (inner.unflatten(-1, (gates.shape[-1], -1)) * gates.unsqueeze(-1)).flatten(-2)
        return self.down_proj(inner)


class DCFormerDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each with a norm before and a residual around."""

    def __init__(self, config: DCFormerConfig, layer_idx: int):
        super().__init__()
        self.self_attn = ComposedAttention(config, layer_idx)
        self.mlp = DCFormerMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        """[B, T, E] to [B, T, E]; `kwargs` are those of `ComposedAttention`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), **kwargs)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DCFormerPreTrainedModel(DecoderPreTrainedModel):
    """What transformers wants to know of DCFormer."""

    config_class = DCFormerConfig
    _no_split_modules = ["DCFormerDecoderLayer"]  # noqa: RUF012


class DCFormerModel(DCFormerPreTrainedModel, Decoder):
    """The decoder without an output layer."""

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(DCFormerDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()


class DCFormerForCausalLM(DCFormerPreTrainedModel, DecoderForCausalLM):
    """DCFormer that predicts the next token."""

    def __init__(self, config: DCFormerConfig):
        super().__init__(config)
        self.model = DCFormerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoModel.register(DCFormerConfig, DCFormerModel)
AutoModelForCausalLM.register(DCFormerConfig, DCFormerForCausalLM)
