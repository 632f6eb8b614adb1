"""What decoders with composed heads share: attention with its cache, masks, and the forward passes. A model adds its layers.

B batch, T queries, S keys, E hidden size, N heads, K key/value heads, D head dim, W window, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, find_packed_sequence_indices
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from dcformer.models.attention import (
    BACKENDS,
    COMPOSED_ATTENTION_FUNCTIONS,
    eager_composed_attention,
    pack,
    packed_width,
    unpack,
)
from dcformer.models.configuration import DecoderConfig
from dcformer.models.generation import PackedGenerationMixin
from dcformer.models.released import COPIES
from dcformer.models.released_weights import conversions_of, renamed
from dcformer.nn import Compose

QK_NORM_EPS = 1e-6


class ComposedAttention(nn.Module):
    """Self-attention with composed heads (arXiv 2405.08553, Section 3), or plain where `config.compose` is `None`."""

    def __init__(self, config: DecoderConfig, layer_idx: int, bias: bool = False):
        super().__init__()
        E, N, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        assert K is not None and D is not None  # the configuration fills them in
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, self.scaling, self.num_key_value_groups = D, D**-0.5, N // K
        self.packed_width = packed_width(config)
        self.is_causal = True
        self.sliding_window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        self.q_proj = nn.Linear(E, N * D, bias=bias)
        self.k_proj = nn.Linear(E, K * D, bias=bias)
        self.v_proj = nn.Linear(E, K * D, bias=bias)
        self.o_proj = nn.Linear(N * D, E, bias=bias)
        self.q_norm = LlamaRMSNorm(D, eps=QK_NORM_EPS) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(D, eps=QK_NORM_EPS) if config.qk_norm else nn.Identity()
        self.compose = Compose(E, N, **config.compose) if config.compose is not None else None

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, T, E] to [B, T, E], and the weights [B, N, T, S] where the attention function has them."""
        shape = (*hidden.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        kwargs |= {"scaling": self.scaling, "sliding_window": self.sliding_window}
        kwargs["dropout"] = self.config.attention_dropout if self.training else 0.0
        if self.compose is None:
            if cache is not None:
                key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
                if attention_mask is not None:  # a growing cache with a window of 1 gives back more keys than the mask is for
                    key, value = (states[:, :, -attention_mask.shape[-1] :] for states in (key, value))
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        else:
            pre, post = self.compose(hidden)
            if cache is not None:
                key, value = (pack(*pair, self.packed_width) for pair in ((key, pre), (value, post)))
                key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
                (key, pre), (value, post) = unpack(key, pre, self.head_dim), unpack(value, post, self.head_dim)
            attend = COMPOSED_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            kwargs |= {"pre": pre, "post": post}
        if kwargs.get("output_attentions", self.config.output_attentions):  # only this function has them
            attend = eager_composed_attention
        out, weights = attend(self, query, key, value, attention_mask, **kwargs)
        return self.o_proj(out.flatten(2)), weights


class DecoderPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and what transformers wants to know."""

    config: DecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _keys_to_ignore_on_load_unexpected = COPIES
    _can_record_outputs = {"hidden_states": GradientCheckpointingLayer, "attentions": ComposedAttention}  # noqa: RUF012

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuses every implementation that would run plain attention in the place of composed attention."""
        if requested_attention is not None and requested_attention not in COMPOSED_ATTENTION_FUNCTIONS:
            raise ValueError(
                f"attn_implementation={requested_attention!r} is not supported; choose 'sdpa' (fast), 'eager' (the "
                f"specification), or a backend: {', '.join(BACKENDS)}"
            )
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    def save_pretrained(  # type: ignore[override]  # the rest by name only
        self, save_directory: str | os.PathLike, *, save_original_format: bool | None = None, **kwargs: Any
    ) -> None:
        """As in transformers, configuration and parameters in one of two formats.

        Args:
            save_directory: folder to write into.
            save_original_format: `True` writes the format of the released checkpoints, `False` ours. By default a model keeps
                the format that it came in; a new one is saved in ours, and so is a quantised one.
            kwargs: as in transformers.

        Raises:
            ValueError: the released format cannot say what the configuration says, or weights are quantised.
        """
        came_as, quantized = self.config._released, getattr(self, "hf_quantizer", None) is not None
        released = came_as is not None and not quantized if save_original_format is None else save_original_format
        if released and quantized:
            raise ValueError("save_original_format=True: the released format has no quantised weights; choose False")
        self.config._released = (came_as or {}) if released else None
        self._weight_conversions = conversions_of(self) if released else []
        try:
            super().save_pretrained(save_directory, save_original_format=released, **kwargs)
        finally:
            self.config._released = came_as

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As in torch, by our names or the released ones: with those a trainer resumes from a checkpoint that it wrote."""
        return super().load_state_dict(renamed(state_dict, self), strict, assign)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Compose):
            module.reset_parameters()


class Decoder(DecoderPreTrainedModel):
    """Embeddings, layers and a norm. A model makes `layers` and `norm`."""

    layers: nn.ModuleList
    norm: nn.Module

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.rotary_emb = GPTNeoXRotaryEmbedding(config)  # type: ignore[arg-type]  # our configuration has all that it reads
        self.layer_types = config.layer_types
        self.gradient_checkpointing = False

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of the last layer, [B, T, E]. Arguments as in transformers' `LlamaModel`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        masks, aligned = self._masks(hidden, attention_mask, position_ids, cache)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(hidden.shape[1], device=hidden.device) + past).unsqueeze(0)
        position_embeddings = self.rotary_emb(hidden, position_ids=position_ids)
        for layer, layer_type in zip(self.layers, self.layer_types, strict=True):
            hidden = layer(
                hidden,
                attention_mask=masks[layer_type],
                position_embeddings=position_embeddings,
                cache=cache,
                aligned=aligned,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache if use_cache else None)

    def _masks(
        self, hidden: Tensor, attention_mask: Tensor | dict | None, position_ids: Tensor | None, cache: Cache | None
    ) -> tuple[dict[str, Tensor | None], bool]:
        """A mask for each type of layer, and whether causality and windows are left to flags (`aligned` in `models.attention`).

        Composed attention takes flags wherever the queries are the last of the keys, so that masks stay linear in the length:
        without a cache and in one that grows. A static cache, or a mask that the caller finished, is transformers' business.
        """
        if self.config._attn_implementation == "paged|eager" and (cache is None or isinstance(cache, Cache)):
            raise ValueError("attn_implementation='paged|eager' is for generate_batch only; choose 'eager'")
        if isinstance(attention_mask, dict):
            return attention_mask, False
        if attention_mask is not None:
            attention_mask = attention_mask.to(hidden.device)
        finished = attention_mask is not None and attention_mask.dim() == 4
        grows = cache is None or (isinstance(cache, Cache) and not any(isinstance(c, StaticLayer) for c in cache.layers))
        if self.config.compose is not None and grows and not finished:
            length = hidden.shape[1] + (0 if cache is None else cache.get_seq_length())
            mask = _hidden_besides(attention_mask, position_ids, cache, length)
            return {kind: mask for kind in self.layer_types}, True
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        return {
            kind: makers[kind](self.config, hidden, attention_mask, cache, position_ids) for kind in set(self.layer_types)
        }, False


def _hidden_besides(
    attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None, length: int
) -> Tensor | None:
    """What is hidden besides causality and windows: padding [B, 1, 1, S], or other documents of a packed row [B, 1, T, T].

    A mask may reach past the `length` positions that there are so far, as when a prompt comes in chunks.
    """
    if attention_mask is not None:
        if attention_mask.shape[1] < length:
            raise ValueError(
                f"attention_mask has length {attention_mask.shape[1]}; it must cover all {length} positions so far"
            )
        padding = attention_mask[:, :length].bool()
        # Reading the mask would break a compiled graph.
        return None if not torch.compiler.is_compiling() and padding.all() else padding[:, None, None, :]
    if position_ids is None or cache is not None:
        return None
    document = find_packed_sequence_indices(position_ids)  # [B, T], or None if every row is one document
    return None if document is None else document[:, None, :, None] == document[:, None, None, :]


class DecoderForCausalLM(DecoderPreTrainedModel, PackedGenerationMixin):
    """A decoder that predicts the next token. A model makes its decoder `model`, and `lm_head`."""

    model: Decoder
    lm_head: nn.Linear
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, V], and the loss where `labels` [B, T] are given (-100 is left out; they are shifted here)."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
