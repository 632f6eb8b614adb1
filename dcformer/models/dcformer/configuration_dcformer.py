"""The configuration of DCFormer: shapes, windows and what is composed.

E hidden size, N heads, K key/value heads, D head dim, W window, R rank, G groups.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import field
from importlib import import_module
from itertools import chain, cycle, islice, repeat
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import AutoConfig

from dcformer.nn import Compose

# Name: layers, E, N, MLP width (8/3 E in steps of 128 for the paper's, arXiv 2405.08553, Section 4.1). The small ones are for a
# laptop and named after their parameters without embeddings.
_SIZES = {
    "1M": (4, 128, 4, 448),
    "3M": (6, 192, 6, 512),
    "10M": (8, 320, 10, 864),
    "25M": (8, 512, 8, 1376),
    "405M": (24, 1024, 16, 2816),
    "834M": (24, 1536, 24, 4096),
    "1.4B": (24, 2048, 32, 5504),
    "2.8B": (32, 2560, 32, 6912),
    "6.9B": (32, 4096, 32, 11008),
}

_LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}

# What transformers, today or in version 4, writes into any config.json beside the keys that its base class takes.
_FOREIGN_KEYS = {
    "_name_or_path",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "finetuning_task",
    "is_decoder",
    "model_type",
    "prefix",
    "pruned_heads",
    "quantization_config",
    "task_specific_params",
    "tie_encoder_decoder",
    "tie_last_hidden_states",
    "tokenizer_class",
    "torchscript",
    "transformers_weights",
    "use_bfloat16",
}

_COMPOSE_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(Compose).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("key_embed_dim", "device", "dtype")
}


def _layer_types(pattern: str | list[str], num_layers: int) -> list[str]:
    """A window pattern as transformers' layer types, repeated to `num_layers`."""
    text = "".join(map(str, pattern)) if isinstance(pattern, (str, list)) else ""
    if not re.fullmatch(r"([LG]([1-9]\d*)?)+", text):
        raise ValueError(
            f"window_pattern={pattern!r} is unknown; write L (local) and G (global), each with a count if repeated, "
            'as in "G", "LG", "LGLL" or "LGL6", or a list of them'
        )
    letters = chain.from_iterable(repeat(letter, int(count or 1)) for letter, count in re.findall(r"([LG])(\d*)", text))
    return [_LAYER_TYPES[letter] for letter in islice(cycle(letters), num_layers)]


@strict
class DCFormerConfig(PreTrainedConfig):
    """What a DCFormer is made of. Keyword arguments only; keys that neither this class nor transformers knows are an error.

    Args:
        vocab_size: number of tokens.
        hidden_size: E.
        intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: N.
        num_key_value_heads: K, a divisor of N; N by default.
        head_dim: D, an even number; E / N by default.
        max_position_embeddings: longest context meant to be used. Longer ones run.
        rope_parameters: rotary embedding, {"rope_type": "default", "rope_theta": 10000.0} by default.
        rms_norm_eps: epsilon of all norms.
        qk_norm: whether each head's queries and keys are normalised before the rotation.
        sliding_window: W, how many keys a query of a local layer sees, itself included.
        window_pattern: which layers are local (L) and which global (G), repeated over the layers: "G", "LG", "LGLL", "LGL6" (a
            count repeats the letter before it), or a list of such items.
        compose: options of `dcformer.Compose`; those left out have its defaults, the paper's. `None` gives the plain
            Transformer++ on `scaled_dot_product_attention`, all else equal.
        tie_word_embeddings: whether the output layer shares the embedding's weights.
        attention_dropout: dropout of the final attention weights in training.
        initializer_range: standard deviation of embeddings and linear layers. `dcformer.Compose` has its own.
        use_cache: whether a forward pass makes a cache where none is said.
        bos_token_id, eos_token_id, pad_token_id: special tokens.

    Raises:
        ValueError: a value does not fit, and which would.
    """

    model_type = "dcformer"

    vocab_size: int = 50304
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    sliding_window: int | None = None
    window_pattern: str | list[str] = "G"
    compose: dict[str, Any] | None = field(default_factory=dict)
    tie_word_embeddings: bool = False
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_shapes()
        self._check_windows(kwargs.pop("layer_types", None))
        self._check_compose()
        kwargs.pop("auto_map", None)  # names remote code, which is never run
        mine = set(vars(self))
        super().__post_init__(**kwargs)
        unknown = [key for key in kwargs if key in vars(self) and key not in mine | _FOREIGN_KEYS]
        if unknown:
            raise ValueError(f"unknown configuration keys {unknown}; known are {', '.join(type(self).__annotations__)}")
        # The Auto classes look a model up by its configuration. Not imported before: transformers may itself be half imported.
        import_module("dcformer.models.dcformer.modeling_dcformer")

    @classmethod
    def from_size(cls, name: str, **overrides: Any) -> DCFormerConfig:
        """The configuration of a named size: the paper's 405M, 834M, 1.4B, 2.8B, 6.9B, or 1M, 3M, 10M, 25M for a laptop.

        Args:
            name: the size.
            overrides: any arguments of the class; they win.

        Raises:
            ValueError: the name is unknown, or as the class.
        """
        if name not in _SIZES:
            raise ValueError(f"size {name!r} is unknown; choose one of {', '.join(_SIZES)}")
        layers, hidden, heads, intermediate = _SIZES[name]
        shape = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": intermediate,
        }
        return cls(**{**shape, **overrides})

    @property
    def layer_types(self) -> list[str]:
        """`window_pattern` in transformers' words, "sliding_attention" or "full_attention" for each layer."""
        return _layer_types(self.window_pattern, self.num_hidden_layers)

    def _check_shapes(self) -> None:
        names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        names += [name for name in ("num_key_value_heads", "head_dim") if getattr(self, name) is not None]
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
        heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ValueError(f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}, or give head_dim")
            self.head_dim = self.hidden_size // heads
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, rotary embeddings turn pairs")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = heads
        if heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads={heads}")
        if not 0 <= self.attention_dropout <= 1:
            raise ValueError(f"attention_dropout={self.attention_dropout} must be between 0 and 1")

    def _check_windows(self, layer_types: list[str] | None) -> None:
        if layer_types is not None and list(layer_types) != self.layer_types:
            raise ValueError(
                f"layer_types={layer_types} are not what window_pattern={self.window_pattern!r} gives in "
                f"{self.num_hidden_layers} layers; leave layer_types out"
            )
        window = self.sliding_window
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ValueError(f"sliding_window={window!r} must be at least 1 (the query itself), or None without local layers")
        if window is None and "sliding_attention" in self.layer_types:
            raise ValueError(f"window_pattern={self.window_pattern!r} has local layers; give their sliding_window")

    def _check_compose(self) -> None:
        if self.compose is None:
            return
        if not isinstance(self.compose, dict):
            raise ValueError(f"compose={self.compose!r} must be a dict of options, or None for plain attention")
        for name, value in self.compose.items():
            if name not in _COMPOSE_OPTIONS:
                raise ValueError(f"compose has the unknown option {name!r}; known are {', '.join(_COMPOSE_OPTIONS)}")
            kind = type(_COMPOSE_OPTIONS[name])
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise ValueError(f"compose has {name}={value!r}; it must be of type {kind.__name__}")
        self.compose = {**_COMPOSE_OPTIONS, **self.compose}
        Compose(self.hidden_size, self.num_attention_heads, **self.compose, device="meta")  # raises for what does not fit


AutoConfig.register("dcformer", DCFormerConfig)
