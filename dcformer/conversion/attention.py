"""What a converted attention module does: weights before its forward, packed in its cache, mixed where it attends.

B batch, T queries, S keys, N heads, K key/value heads, H = N/K, D head dim, E hidden size, R rank.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import create_position_bias_mask
from transformers.modeling_utils import AttentionInterface

from dcformer.models.attention import BACKENDS, composed_attention_forward, eager_composed_attention, pack, unpack
from dcformer.nn import Compose
from dcformer.ops import Composition

# What transformers' models call the states that keys are projected from, where they are not the queries' own.
_KEY_STATES = ("key_value_states", "encoder_hidden_states")
# And the cache, which is a `Cache`, a pair of them, or the paged one of continuous batching.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_IDENTITY = Composition()
# Arguments by which a family hands over keys or values, or states for them, that no mixing weights are made from.
_FOREIGN_KEYS = {
    "key", "keys", "key_tensor", "k", "context", "context_hidden_states", "cross_attention_states", "key_hidden_states",
    "shared_kv_states",
}  # fmt: skip


def is_attention(module: nn.Module) -> bool:
    """Whether a module asks transformers' attention interface for its function, and hands its keyword arguments on to it."""
    forward = inspect.unwrap(type(module).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    kinds = {parameter.kind for parameter in inspect.signature(forward).parameters.values()}
    return {"get_interface", "_attn_implementation"} <= set(names) and inspect.Parameter.VAR_KEYWORD in kinds


def obstacle(module: Any) -> str | None:
    """Why an attention module cannot be converted, or `None`. Its keys would be mixed with the weights of others."""
    forward = inspect.unwrap(type(module).forward)
    foreign = sorted(_FOREIGN_KEYS & set(inspect.signature(forward).parameters))
    if foreign:
        return f"it attends to keys that others made ({', '.join(foreign)})"
    if hasattr(module, "kv_lora_rank"):
        return "it caches compressed keys"
    if hasattr(module, "indexer"):
        return "it chooses its keys by an indexer"
    if inspect.getsource(forward).count("attention_interface(") > 1:
        return "it attends more than once, to parts of the sequence or of the heads"
    return None


def head_count(module: Any) -> int:
    """N of an attention module."""
    for name in ("num_heads", "num_attention_heads", "n_heads"):
        if hasattr(module, name):
            return getattr(module, name)
    return module.config.num_attention_heads


class ComposedConfig:
    """A configuration as a converted attention module sees it: the name of its attention function is that of a composed one.

    Everything else in transformers, which also asks what the function is called, sees the usual name in the same configuration.
    """

    def __init__(self, config: Any):
        self.original = config

    def __getattr__(self, name: str) -> Any:
        if name == "original" or name.startswith("__"):  # being copied, it has none yet
            raise AttributeError(name)
        return getattr(self.original, name)

    @property
    def _attn_implementation(self) -> str:
        name = self.original._attn_implementation
        check_implementation(name)
        return _COMPOSED + name


def check_implementation(name: object) -> None:
    """Refuses attention functions that would leave out the composition."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation={name!r} cannot compose heads; choose one of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )


class ComposeHeads:
    """Forward pre-hook of an attention module: gives its attention function `pre` and `post`, and its cache the packing."""

    def __init__(self, module: nn.Module):
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(module.forward).parameters.values()
        self.names = [p.name for p in parameters if p.kind in positional]

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments of `module.forward`, with the mixing among them."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        hidden = given[self.names[0]]
        sources = [given[name] for name in _KEY_STATES if given.get(name) is not None]
        caches = [name for name in _CACHES if given.get(name) is not None]
        cache = given[caches[0]] if caches else None
        if sources and isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(module.layer_idx):
            sources = [sources[0][:, :0]]  # the cache holds the weights of the keys already
        pre, post = module.compose(hidden, *sources)
        given |= {"pre": pre, "post": post, "packed": cache is not None}
        for name in caches:
            packing = _PackingEncoderDecoderCache if isinstance(cache, EncoderDecoderCache) else _PackingCache
            given[name] = packing(given[name], pre, post)
        return (), given


class _PackingCache:
    """A cache, as one attention module sees it: the mixing weights of new keys are stored behind them."""

    def __init__(self, cache: Cache, pre: Composition, post: Composition):
        self._cache, self._pre, self._post = cache, pre, post

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def __len__(self) -> int:
        return len(self._cache)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of all positions, [B, K, S, D + (2R+1) H]."""
        return self._cache.update(pack(key, self._pre), pack(value, self._post), *args, **kwargs)


class _PackingEncoderDecoderCache(EncoderDecoderCache):
    """The same for a pair of caches. Models ask for this class; what has been cached for cross-attention is known to both."""

    def __init__(self, cache: EncoderDecoderCache, pre: Composition, post: Composition):
        self.self_attention_cache = _PackingCache(cache.self_attention_cache, pre, post)  # type: ignore[assignment]
        self.cross_attention_cache = _PackingCache(cache.cross_attention_cache, pre, post)  # type: ignore[assignment]
        self.is_updated = cache.is_updated


def _unpack(packed: Tensor, composition: Composition, heads: int) -> tuple[Tensor, Composition]:
    if composition.key is None:
        return packed, composition
    width = composition.key.shape[2] * heads // packed.shape[1]
    return unpack(packed, composition, packed.shape[3] - width)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pre: Composition = _IDENTITY,
    post: Composition = _IDENTITY,
    packed: bool = False,
    implementation: str = "auto",
    output_attentions: bool = False,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with composed heads, as transformers calls it.

    Args:
        module: the attention module.
        query: [B, N, T, D].
        key: [B, K, S, D], or as `_PackingCache` stores it.
        value: [B, K, S, D], or as `_PackingCache` stores it.
        attention_mask: bool (True = visible) or float (added), broadcasts to [B, N, T, S], or `None`.
        pre: mixing of the scores.
        post: mixing of the weights.
        packed: whether keys and values come from a cache with the mixing weights behind them.
        implementation: "eager", or a backend of `dcformer.composed_attention`.
        output_attentions: whether the weights are wanted.
        position_bias: [1, N, T, S], added to the composed scores.
        kwargs: what the family has besides. Capped scores and sinks, which no fast backend has, are left to the specification.

    Returns:
        ([B, T, N, D], the composed weights [B, N, T, S] where wanted or `implementation` is "eager")

    Raises:
        ValueError: the module did not hand the composition on.
    """
    if isinstance(getattr(module, "compose", None), Compose) and pre is _IDENTITY and post is _IDENTITY:
        raise ValueError(f"{type(module).__name__} does not hand keyword arguments to its attention function")
    if packed:
        heads = query.shape[1]
        (key, pre), (value, post) = _unpack(key, pre, heads), _unpack(value, post, heads)
    if position_bias is not None:
        causal = module.is_causal and query.shape[2] > 1
        attention_mask = create_position_bias_mask(position_bias, attention_mask, causal, query, key)
    beyond = any(kwargs.get(name) is not None for name in ("softcap", "s_aux"))
    if implementation == "eager":  # where no mask means that every key is seen; "sdpa" asks the module
        kwargs["is_causal"] = False
    if implementation == "eager" or output_attentions or (implementation == "auto" and beyond):
        return eager_composed_attention(module, query, key, value, attention_mask, pre, post, **kwargs)
    return composed_attention_forward(module, query, key, value, attention_mask, pre, post, backend=implementation, **kwargs)


# What a converted model may be set to, and what that means. The families' modules look functions up in one table for all
# models, so that the composed ones need names of their own there.
_COMPOSED = "composed "
IMPLEMENTATIONS = {"sdpa": "auto", "eager": "eager", "paged|eager": "eager"}
IMPLEMENTATIONS |= {name: name.removeprefix("dc_") for name in BACKENDS}
for _name, _implementation in IMPLEMENTATIONS.items():
    AttentionInterface.register(_COMPOSED + _name, partial(attend, implementation=_implementation))
