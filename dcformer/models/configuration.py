"""What the configurations of all decoders share: shapes, windows and what is composed.

E hidden size, N heads, K key/value heads, D head dim, W window, R rank, G groups.
"""

from __future__ import annotations

import inspect
import json
import os
import warnings
from dataclasses import field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from dcformer.models import released
from dcformer.models.windows import layer_types
from dcformer.nn import Compose

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


@strict
class DecoderConfig(PreTrainedConfig):
    """What a decoder is made of. Keyword arguments only; keys that neither this class nor transformers knows are an error.

    The config.json of the released checkpoints is read too; in it unknown keys are ignored, with a warning. Saving keeps the
    format that a configuration came in.

    Args:
        vocab_size: number of tokens.
        hidden_size: E.
        intermediate_size: width of the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: N.
        num_key_value_heads: K, a divisor of N; N by default.
        head_dim: D, an even number; E / N by default.
        max_position_embeddings: longest context meant to be used. Longer ones run.
        rope_parameters: rotary embedding, {"rope_type": "default", "rope_theta": 10000.0} by default.
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

    # The module that registers the models, and named sizes: layers, E, N, MLP width.
    modeling: ClassVar[str] = ""
    sizes: ClassVar[dict[str, tuple[int, int, int, int]]] = {}

    vocab_size: int = 50304
    hidden_size: int = 1024
    intermediate_size: int
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
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
        self._released: dict[str, Any] | None = kwargs.pop("_released", None)  # see `released.read_config`
        mine = set(vars(self))
        super().__post_init__(**kwargs)
        unknown = [key for key in kwargs if key in vars(self) and key not in mine | _FOREIGN_KEYS]
        if unknown and self._released is not None:
            warnings.warn(f"config.json has keys that mean nothing to {self.model_type}: {', '.join(unknown)}", stacklevel=2)
            for key in unknown:
                delattr(self, key)
        elif unknown:
            known = {f.name for f in fields(self)} - {f.name for f in fields(PreTrainedConfig)}
            raise ValueError(f"unknown configuration keys {unknown}; known are {', '.join(sorted(known))}")
        self._check_rotation()
        # The Auto classes look a model up by its configuration. Not imported before: transformers may itself be half imported.
        import_module(self.modeling)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, of the content of a config.json in our format or in the released one."""
        if released.is_released(config_dict):
            config_dict = released.read_config(config_dict, cls.model_type)
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, always in our format."""
        return {key: value for key, value in super().to_dict().items() if key != "_released"}

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """As in transformers, in the format that the configuration came in.

        Raises:
            ValueError: it came in the released format and was given what that cannot say.
        """
        if self._released is None:
            super().to_json_file(json_file_path, use_diff)
            return
        theirs, ours = released.write_config(self), self.to_dict()
        theirs |= {key: ours[key] for key in ("model_type", "transformers_version", "quantization_config") if key in ours}
        theirs["torch_dtype"] = ours["dtype"]
        Path(json_file_path).write_text(json.dumps(theirs, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def from_size(cls, name: str, **overrides: Any) -> Self:
        """The configuration of a named size: those in `sizes`.

        Args:
            name: the size.
            overrides: any arguments of the class; they win.

        Raises:
            ValueError: the name is unknown, or as the class.
        """
        if name not in cls.sizes:
            raise ValueError(f"size {name!r} is unknown; choose one of {', '.join(cls.sizes)}")
        layers, hidden, heads, intermediate = cls.sizes[name]
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
        return layer_types(self.window_pattern, self.num_hidden_layers)

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

    def _check_rotation(self) -> None:
        assert self.rope_parameters is not None and self.head_dim is not None  # filled in by now
        factor = self.rope_parameters.get("partial_rotary_factor", 1)
        rotated = int(self.head_dim * factor)
        if rotated % 2 or not 2 <= rotated <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor={factor} rotates {rotated} of head_dim={self.head_dim} channels; pairs are rotated, at "
                "least one"
            )

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
