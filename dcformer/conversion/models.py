"""Composable heads in a transformers model: its attention modules, classes and configuration changed in place, and back.

N heads, G groups, E hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from dcformer.conversion.attention import IMPLEMENTATIONS, ComposedConfig, ComposeHeads, head_count, is_attention, obstacle
from dcformer.conversion.classes import Converted, composed_class, is_known, register
from dcformer.conversion.layers import check_heads, choose_layers
from dcformer.nn import Compose


def convert_model(model: PreTrainedModel, layers: list[str] | None, options: dict[str, Any]) -> None:
    """`dcformer.convert` for models of transformers."""
    if any(hasattr(module, "compose") for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} has composable heads already, or an option of its own for them")
    modules = _make(model, layers, options)  # raises before anything is changed
    # Other models may share the configuration, and stay as they are.
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(vars(module).get("config"), PreTrainedConfig):
            module.config = copy.deepcopy(vars(module)["config"], copies)
    base, revision = model.config.name_or_path or None, getattr(model.config, "_commit_hash", None)
    _install(model, modules, {"layers": layers, **options})
    model.base_model_name_or_path, model.base_model_revision = base, revision  # type: ignore[assignment]


def convert_like(model: Any, composition: dict[str, Any]) -> None:
    """Makes a model with the classes of the base what `composition`, the arguments of `convert`, says."""
    options = dict(composition)
    _install(model, _make(model, options.pop("layers", None), options), composition)


def restore_model(model: Any) -> None:
    """`dcformer.unconvert` for models of transformers."""
    if not issubclass(type(model), Converted):
        raise ValueError(f"this {type(model).__name__} is not converted")
    if not isinstance(model.config, model.config_class):
        raise ValueError(f"this {type(model).__name__} is part of a converted model; unconvert that model")
    for module in model.modules():
        if isinstance(getattr(module, "compose", None), Compose):
            del module.compose
            module.config = module.config.original
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, ComposeHeads):
                    del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    model.config.__class__ = model.original_class.config_class
    del model.config.composition, model.config.base_model_name_or_path, model.config.base_model_revision
    vars(model).pop("base_model_name_or_path", None)
    vars(model).pop("base_model_revision", None)
    for module in model.modules():
        if isinstance(module, Converted):
            module.__class__ = module.original_class


def _install(model: Any, modules: dict[str, tuple[Any, Compose]], composition: dict[str, Any]) -> None:
    for attention, compose in modules.values():
        attention.compose = compose.train(attention.training)
        attention.config = ComposedConfig(attention.config)
        attention.register_forward_pre_hook(ComposeHeads(attention), with_kwargs=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, Converted):
            module.__class__ = composed_class(type(module))  # type: ignore[arg-type]
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs  # transformers looks them up by the name of the class
    if not isinstance(model.config, model.config_class):
        model.config.__class__ = model.config_class
        model.config.base_model_name_or_path = model.config.base_model_revision = None
    model.config.composition = composition
    family = model.original_class.config_class
    if is_known(family):
        register(family.model_type)
    if model.config._attn_implementation not in IMPLEMENTATIONS:  # such as flash attention
        model.set_attn_implementation(model.get_correct_attn_implementation(None))


def _make(model: Any, layers: list[str] | None, options: dict[str, Any]) -> dict[str, tuple[Any, Compose]]:
    """The chosen attention modules by name, each with what makes its mixing weights.

    Names are those that the base model has, with or without its own, so that they hold for every class of a family.
    """
    prefix = f"{model.base_model_prefix}."
    attentions = {name.removeprefix(prefix): module for name, module in model.named_modules() if is_attention(module)}
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} cannot be converted: its attention does not go through transformers' attention interface"
        )
    chosen = choose_layers(attentions, layers, prefix)
    return {name: (module, _compose(model, name, module, options)) for name, module in attentions.items() if name in chosen}


def _compose(model: Any, name: str, attention: Any, options: dict[str, Any]) -> Compose:
    reason = obstacle(attention)
    if reason is not None:
        raise ValueError(f"{name}, a {type(attention).__name__}, cannot be converted: {reason}; leave it out of layers")
    check_heads(name, head_count(attention), options)
    like = next(attention.parameters())
    compose = Compose(attention.config.hidden_size, head_count(attention), device=like.device, dtype=model.dtype, **options)
    compose.reset_to_identity()
    return compose
