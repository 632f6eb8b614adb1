"""Two other attentions that a DCFormer is compared with, as models to train in a study; they have no cache.

B batch, T length, E hidden size, N heads, D head dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward

from dcformer.models.counts import count_flops
from dcformer.models.dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.models.decoder import ComposedAttention


@strict
class RivalConfig(DCFormerConfig):
    """A Transformer++ of which only the attention is another."""

    modeling = "dcformer.studies.rivals"

    compose: dict[str, Any] | None = None
    use_cache: bool = False

    def more_parameters(self) -> int:
        """What it has besides the Transformer++'s."""
        raise NotImplementedError

    def more_flops(self, length: int) -> float:
        """What it does besides the Transformer++, forward per token, counted as by `dcformer.models.counts.count_flops`."""
        raise NotImplementedError


@strict
class GatedConfig(RivalConfig):
    """Gated attention (arXiv 2505.06708, the gate after the attention, its best place).

    Args:
        gate_channels: whether each channel of each head has a gate of its own, or each head one.
    """

    model_type = "dcformer_gated"

    gate_channels: bool = False

    @property
    def gates(self) -> int:
        """Gates a token."""
        assert self.head_dim is not None
        return self.num_attention_heads * (self.head_dim if self.gate_channels else 1)

    def more_parameters(self) -> int:
        """A projection in each layer."""
        return self.num_hidden_layers * self.hidden_size * self.gates

    def more_flops(self, length: int) -> float:
        """A projection in each layer; the gating itself, one multiplication a channel, counts as norms do, not at all."""
        return 2 * self.more_parameters()


@strict
class DifferentialConfig(RivalConfig):
    """Differential attention (arXiv 2410.05258): N heads are paired, so that parameters are as many as the Transformer++'s."""

    model_type = "dcformer_differential"

    def more_parameters(self) -> int:
        """Four vectors of D for lambda and a norm of 2 D in each layer."""
        assert self.head_dim is not None
        return self.num_hidden_layers * 6 * self.head_dim

    def more_flops(self, length: int) -> float:
        """Each map weighs values of 2 D channels in place of D."""
        return count_flops(self, length).products / 2


class _RivalAttention(ComposedAttention):
    """The Transformer++'s attention up to the heads' outputs, which a rival makes its own of."""

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """[B, T, E] to [B, T, E]."""
        if cache is not None:
            raise ValueError(
                "cache must be None: the attentions of dcformer.studies.rivals have no cache; use_cache=False would do"
            )
        shape = (*hidden.shape[:2], -1, self.head_dim)
        query, key, value = (p(hidden).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return self.o_proj(self.heads(hidden, query, key, value, attention_mask).flatten(2)), None

    def heads(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Queries, keys and values [B, N, T, D] to what the heads give out, [B, T, N, D]."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """As transformers attends: [B, T, heads, channels of a value]."""
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        return function(self, query, key, value, mask, scaling=self.scaling, dropout=dropout)[0]


class GatedAttention(_RivalAttention):
    """o = sigmoid(h Wg) * softmax(q k^T) v, a gate for each head or channel."""

    def __init__(self, config: GatedConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.gate_proj = nn.Linear(config.hidden_size, config.gates, bias=False)

    def heads(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """As the class."""
        out = self.attend(query, key, value, mask)
        return out * torch.sigmoid(self.gate_proj(hidden)).view(*out.shape[:3], -1)


class DifferentialAttention(_RivalAttention):
    """o = (1 - initial) * norm((softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v) in each pair of heads, v of both.

    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + initial, where initial = 0.8 - 0.6 exp(-0.3 layer), layers counted from 0.
    """

    def __init__(self, config: DifferentialConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.num_attention_heads % 2 or config.num_key_value_heads != config.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={config.num_attention_heads} must be even and num_key_value_heads="
                f"{config.num_key_value_heads} the same: differential attention pairs heads"
            )
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        self.lambdas = nn.Parameter(0.1 * torch.randn(4, self.head_dim))  # lq1, lk1, lq2, lk2
        self.norm = LlamaRMSNorm(2 * self.head_dim, eps=1e-5)

    def heads(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """As the class."""
        pairs = value.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)  # [B, N/2, T, 2 D]
        # Fused kernels want keys as wide as values.
        query, key = (F.pad(states, (0, self.head_dim)) for states in (query, key))
        first, second = self.attend(query, key, pairs.repeat_interleave(2, dim=1), mask).unflatten(2, (-1, 2)).unbind(3)
        lq1, lk1, lq2, lk2 = self.lambdas
        weight = torch.exp((lq1 * lk1).sum()) - torch.exp((lq2 * lk2).sum()) + self.initial
        out = (1 - self.initial) * self.norm(first - weight * second)  # [B, T, N/2, 2 D]
        return out.unflatten(3, (2, -1)).flatten(2, 3)


class _Rival(DCFormerForCausalLM):
    """A Transformer++ that predicts the next token, with another attention in each layer."""

    attention: type[_RivalAttention]

    def __init__(self, config: RivalConfig):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = self.attention(config, index)
        self.init_weights()


class GatedForCausalLM(_Rival):
    """With `GatedAttention`."""

    config_class = GatedConfig
    attention = GatedAttention


class DifferentialForCausalLM(_Rival):
    """With `DifferentialAttention`."""

    config_class = DifferentialConfig
    attention = DifferentialAttention


for _config, _model in ((GatedConfig, GatedForCausalLM), (DifferentialConfig, DifferentialForCausalLM)):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForCausalLM.register(_config, _model)
