"""Classes of converted models, made on demand: `DCX(X)` with model type `dc_x`, known to the Auto classes."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dcformer.conversion.attention import IMPLEMENTATIONS
from dcformer.nn import Compose

PREFIX = "dc_"  # of model types


class Converted:
    """What a converted model does differently. It stands before the model's own class."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        from dcformer.conversion.convert import install

        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        install(cast(PreTrainedModel, self), config.composition or {})

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Standard names mean composed attention; every one that would leave out the composition is refused."""
        if requested_attention in IMPLEMENTATIONS:
            return requested_attention
        known = {None: "auto", "sdpa": "auto", "eager": "eager"} | {f"dc_{name}": name for name in IMPLEMENTATIONS.values()}
        if requested_attention not in known:
            names = ", ".join(repr(name) for name in known if name)
            raise ValueError(f"attn_implementation={requested_attention!r} cannot compose heads; choose one of {names}")
        return f"converted_{known[requested_attention]}"

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers would look into the source of the class, which there is none of

    def _get_static_cache_init_shape(self) -> None:
        """Packed keys are wider than `config.head_dim`, so a static cache takes its shape from the first keys it sees."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Compose):
            module.reset_to_identity()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; a part whose configuration does not tell of the composition is refused."""
        if not isinstance(self.config, self.config_class):  # type: ignore[attr-defined]
            raise ValueError(f"this {type(self).__name__} is part of a converted model; save that model")
        super().save_pretrained(*args, **kwargs)  # type: ignore[misc]


@cache
def composed_config(base: Any) -> Any:
    """The configuration class of a family's converted models: the family's, and `composition`, the options of `convert`."""
    body = {
        "__module__": __name__,
        "__doc__": f"`{base.__name__}` of a model with composed heads.",
        "__annotations__": {"composition": dict | None},
        "composition": None,
        "model_type": PREFIX + base.model_type,
    }
    return strict(type(f"DC{base.__name__}", (base,), body))


@cache
def composed_class(base: Any) -> Any:
    """The class of a converted model. It also keeps the family's renaming of weights between file and model."""
    body = {"__module__": __name__, "__doc__": f"`{base.__name__}` with composed heads.", "base": base}
    made: Any = type(f"DC{base.__name__}", (Converted, base), body)
    made.config_class = composed_config(base.config_class)
    for old, new in ((base.__name__, made.__name__), (base.config_class.model_type, made.config_class.model_type)):
        mapping = get_checkpoint_conversion_mapping(old)
        if mapping is not None:
            register_checkpoint_conversion_mapping(new, mapping, overwrite=True)
    return made


@cache
def register(model_type: str) -> Any:
    """Makes the Auto classes know the converted models of a family.

    Args:
        model_type: that of the family, such as "llama".

    Returns:
        The configuration class of the converted models.
    """
    base = CONFIG_MAPPING[model_type]
    config = composed_config(base)
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if not (isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass) and isinstance(mapping, _LazyAutoMapping)):
            continue
        if base in mapping:
            classes = mapping[base]
            made = [composed_class(c) for c in (classes if isinstance(classes, (tuple, list)) else [classes])]
            mapping.register(config, tuple(made) if len(made) > 1 else made[0], exist_ok=True)
    return config
