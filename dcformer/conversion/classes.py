"""Classes of converted models, made on demand: `DCX(X)` with model type `dc_x`, known to the Auto classes."""

from __future__ import annotations

import copy
import os
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from huggingface_hub.dataclasses import strict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.generation.continuous_batching.utils import find_num_key_value_heads
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass, _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from dcformer.conversion.attention import check_implementation, head_count, is_attention
from dcformer.conversion.auto import PREFIX
from dcformer.conversion.layers import is_composition
from dcformer.models.attention import BACKENDS
from dcformer.models.generation import widen_paged_cache
from dcformer.nn import Compose

COMPOSITION_FILE = "composition.safetensors"  # in place of model.safetensors where the base model's weights are elsewhere
# Arguments of `from_pretrained` that say where a folder of the hub comes from.
_PLACE = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class Converted(PreTrainedModel):
    """What a converted model does differently. It stands before the model's own class.

    Attributes:
        original_class: the family's own class.
        base_model_name_or_path: the checkpoint that holds the base model's weights as they are, if there is one.
        base_model_revision: its commit, where it is on the hub.
    """

    original_class: ClassVar[Any]
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    _supports_flash_attn = False  # else continuous batching would change to it

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        from dcformer.conversion.models import convert_like

        super().__init__(config, *args, **kwargs)
        convert_like(self, config.composition or {})

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As in transformers; what would leave out the composition is refused."""
        if requested_attention is not None:
            check_implementation(requested_attention)
        if requested_attention in BACKENDS:  # which get the same masks as "sdpa"
            super().get_correct_attn_implementation("sdpa", is_init_check)
        return super().get_correct_attn_implementation(requested_attention, is_init_check)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # transformers would look into the source of the class, which there is none of

    def _get_static_cache_init_shape(self) -> None:
        """Packed keys are wider than `config.head_dim`, so a static cache takes its shape from the first keys it sees."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers.

        Raises:
            ValueError: keys and values of all layers are not of one width, as a paged cache wants them.
        """
        attentions = [module for module in self.get_decoder().modules() if is_attention(module)]
        rows = {_packed_rows(getattr(module, "compose", None), side) for module in attentions for side in ("pre", "post")}
        if len(rows) > 1:
            raise ValueError(
                "continuous batching needs key-wise weights in every layer, both before and after the softmax, or in none; "
                "convert all layers with pre=True and post=True, or with key_wise=False"
            )
        manager = super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]
        config = self.config.get_text_config()
        channels = rows.pop() * head_count(attentions[0]) // find_num_key_value_heads(config)
        return widen_paged_cache(manager, config, channels)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Compose):
            module.reset_to_identity()
        else:
            super()._init_weights(module)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, adapter_only: bool = False, **kwargs: Any) -> None:
        """As in transformers. `from_pretrained` of the Auto classes loads the folder once dcformer is imported.

        Args:
            save_directory: folder to write into.
            args: as in transformers.
            adapter_only: whether to save the composition alone, a few MB, and the name of the base model, whose weights must
                still be those of the checkpoint that it came from.
            kwargs: as in transformers.

        Raises:
            ValueError: this is a part of a converted model, whose configuration does not tell of the composition, or the
                model's code came with its checkpoint; or `adapter_only` where the base model came from no checkpoint or is
                being trained, or together with another option.
        """
        assert self.config_class is not None
        if not isinstance(self.config, self.config_class):
            raise ValueError(f"this {type(self).__name__} is part of a converted model; save that model")
        if getattr(self.config, "auto_map", None) and not is_known(self.original_class.config_class):
            # The Auto classes would load what it names, without the composition.
            raise ValueError(
                f"the code of {self.original_class.__name__} came with its checkpoint (auto_map), from where a converted model "
                "cannot be loaded; save its state_dict()"
            )
        if not adapter_only:
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        if args or kwargs:
            raise ValueError(f"adapter_only=True takes no other options, such as {', '.join(kwargs) or repr(args)}")
        if self.base_model_name_or_path is None:
            raise ValueError("adapter_only=True needs a model that was loaded from a checkpoint and then converted")
        trained = [name for name, p in self.named_parameters() if p.requires_grad and not is_composition(name)]
        if trained:
            raise ValueError(
                f"adapter_only=True would lose what {trained[0]} and {len(trained) - 1} more learn; convert with "
                "trainable='composition', or save all"
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items() if is_composition(name)}
        partial = folder / f"{COMPOSITION_FILE}.partial"
        save_file(weights, partial, metadata={"format": "pt"})
        partial.replace(folder / COMPOSITION_FILE)
        config = copy.deepcopy(self.config)
        config.architectures = [type(self).__name__]
        config.base_model_name_or_path = self.base_model_name_or_path
        config.base_model_revision = self.base_model_revision
        config.save_pretrained(folder)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        config: Any = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As in transformers. A folder with the composition alone loads the base model that it names too.

        Raises:
            ValueError: composition weights are missing, or do not fit.
        """
        from dcformer.conversion.models import convert_like

        place = {name: kwargs.pop(name) for name in _PLACE if name in kwargs}
        if not isinstance(config, PreTrainedConfig):
            config = cast(Any, cls.config_class).from_pretrained(config or pretrained_model_name_or_path, **place)
        if config.base_model_name_or_path is None:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path, *args, config=config, output_loading_info=True, **place, **kwargs
            )
            model, info = loaded
            missing = sorted(name for name in info["missing_keys"] if is_composition(name))
            if missing:
                raise ValueError(f"{pretrained_model_name_or_path} lacks composition weights: {', '.join(missing)}")
        else:
            file: Any = cached_file(pretrained_model_name_or_path, COMPOSITION_FILE, **place)
            place.pop("subfolder", None)  # that of the composition
            place["revision"] = config.base_model_revision
            model, info = cls.original_class.from_pretrained(
                config.base_model_name_or_path, *args, config=plain_config(config), output_loading_info=True, **place, **kwargs
            )
            if info["missing_keys"]:  # such as a new head, which was not saved either
                names = ", ".join(sorted(info["missing_keys"]))
                raise ValueError(
                    f"{config.base_model_name_or_path} lacks weights of the base model: {names}; "
                    "save a model that has others than its checkpoint without adapter_only"
                )
            convert_like(model, config.composition)
            model.base_model_name_or_path = config.base_model_name_or_path
            model.base_model_revision = config.base_model_revision
            _load_composition(model, load_file(file), file)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(is_composition(name))
        return (model, info) if output_loading_info else model


def plain_config(config: Any) -> Any:
    """A copy that is again the base model's."""
    config = copy.deepcopy(config)
    config.__class__ = type(config).__mro__[1]
    del config.composition, config.base_model_name_or_path, config.base_model_revision
    return config


def _load_composition(model: Any, weights: dict[str, Tensor], file: str) -> None:
    prefix = f"{model.base_model_prefix}."  # which a model without a head does not have
    weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    ours = {name.removeprefix(prefix): p for name, p in model.named_parameters() if is_composition(name)}
    misfits = sorted(
        n for n in ours.keys() | weights.keys() if n not in ours or n not in weights or ours[n].shape != weights[n].shape
    )
    if misfits:
        raise ValueError(f"{file} does not fit the base model: {', '.join(misfits)}")
    absent = sorted(name for name, parameter in ours.items() if parameter.is_meta)
    if absent:
        raise ValueError(f"device_map leaves no place for {absent[0]}; save the whole model to offload parts of it")
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(weights[name])


def _packed_rows(compose: Compose | None, side: str) -> int:
    """How many weights a key or value brings along for each head."""
    return 2 * compose.rank + 1 if compose and side in compose.sides and "key" in compose.parts else 0


@cache
def composed_config(base: Any) -> Any:
    """The configuration class of a family's converted models.

    It adds `composition`, the options of `convert`, and where the composition is saved alone the place of the base model.
    """
    body = {
        "__module__": __name__,
        "__doc__": f"`{base.__name__}` of a model with composed heads.",
        "__annotations__": {
            "composition": dict | None,
            "base_model_name_or_path": str | None,
            "base_model_revision": str | None,
        },
        "composition": None,
        "base_model_name_or_path": None,
        "base_model_revision": None,
        "model_type": PREFIX + base.model_type,
    }
    return strict(type(f"DC{base.__name__}", (base,), body))


@cache
def composed_class(base: Any) -> Any:
    """The class of a converted model. It also keeps the family's renaming of weights between file and model."""
    body = {"__module__": __name__, "__doc__": f"`{base.__name__}` with composed heads.", "original_class": base}
    made: Any = type(f"DC{base.__name__}", (Converted, base), body)
    made.config_class = composed_config(base.config_class)
    for old, new in ((base.__name__, made.__name__), (base.config_class.model_type, made.config_class.model_type)):
        mapping = get_checkpoint_conversion_mapping(old)
        if mapping is not None:
            register_checkpoint_conversion_mapping(new, mapping, overwrite=True)
    return made


def is_known(config: Any) -> bool:
    """Whether a configuration class is the one that `AutoConfig` has for its model type."""
    return config.model_type in CONFIG_MAPPING and CONFIG_MAPPING[config.model_type] is config


@cache
def register(model_type: str) -> Any:
    """Makes the Auto classes know the converted models of a family.

    Args:
        model_type: that of the family, such as "llama".

    Returns:
        The configuration class of the converted models.
    """
    base: Any = CONFIG_MAPPING[model_type]
    config = composed_config(base)
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None)
        if not (isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass) and isinstance(mapping, _LazyAutoMapping)):
            continue
        if base in mapping:
            classes: Any = mapping[base]
            made = [composed_class(c) for c in (classes if isinstance(classes, (tuple, list)) else [classes])]
            mapping.register(config, tuple(made) if len(made) > 1 else made[0], exist_ok=True)
    return config
