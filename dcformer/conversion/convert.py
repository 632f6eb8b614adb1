"""`convert` gives a pretrained transformer composable heads in place, `unconvert` takes them away again.

N heads, G groups, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from dcformer.conversion.attention import ComposeHeads, head_count, is_attention
from dcformer.conversion.classes import Converted, composed_class
from dcformer.nn import Compose


def convert(
    model: PreTrainedModel,
    *,
    layers: Iterable[str] | None = None,
    trainable: Literal["all", "composition"] = "all",
    rank: int = 2,
    groups: int = 1,
    query_wise: bool = True,
    key_wise: bool = True,
    gates: bool = True,
    static: bool = False,
    pre: bool = True,
    post: bool = True,
) -> PreTrainedModel:
    """Gives a Hugging Face transformer composable heads, in place. Its outputs stay the same until it is trained.

    Works for every model whose attention modules go through transformers' attention interface: self- and cross-attention,
    decoders with any cache, encoders, vision models. The model's class becomes a subclass of its own, `DCLlamaForCausalLM` for
    example, that saves and loads with the usual methods and the Auto classes after `import dcformer`.

    See `Compose.reset_to_identity` for how the new parameters start. Half of them (`dw1` and the w1 half of `qkw`) have a
    gradient of exactly zero at the first step, being behind a factor that is zero, and learn from the second step on.

    Args:
        model: what to convert.
        layers: names of modules; attention in them is converted. All attention by default.
        trainable: "composition" freezes every other parameter; "all" leaves `requires_grad` as it is.
        rank: R of the dynamic mixing; see `Compose` for this and the following.
        groups: G; heads mix only inside their group.
        query_wise: whether the query's hidden state mixes heads.
        key_wise: whether the key's hidden state mixes heads.
        gates: whether each head is also scaled by its own gate.
        static: whether there is a learned mixing that is the same everywhere.
        pre: whether scores are mixed.
        post: whether weights are mixed.

    Returns:
        `model`.

    Raises:
        ValueError: the model is converted already, is one of ours, has attention code of its own, has no attention at a given
            name, or too few heads for `rank` or `groups`.
    """
    if trainable not in ("all", "composition"):
        raise ValueError(f"trainable={trainable!r} is unknown; choose 'all' or 'composition'")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; it must be a transformers.PreTrainedModel")
    if any(hasattr(module, "compose") for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} has composable heads already, or an option of its own for them")
    options = {
        "layers": None if layers is None else [layers] if isinstance(layers, str) else list(layers),
        "rank": rank, "groups": groups, "query_wise": query_wise, "key_wise": key_wise, "gates": gates, "static": static,
        "pre": pre, "post": post,
    }  # fmt: skip
    install(model, options)
    if trainable == "composition":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".compose." in name)
    return model


def unconvert(model: Any) -> Any:
    """Takes the composition of a converted model away, in place: the base model with its weights as they are now.

    Raises:
        ValueError: the model is not converted.
    """
    if not isinstance(model, Converted):
        raise ValueError(f"this {type(model).__name__} is not converted")
    implementation = "eager" if model.config._attn_implementation == "converted_eager" else None
    for module in model.modules():
        if isinstance(getattr(module, "compose", None), Compose):
            del module.compose
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, ComposeHeads):
                    del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        if isinstance(module, Converted):
            module.__class__ = type(module).base
    model.config.__class__ = model.config_class
    del model.config.composition
    model.set_attn_implementation(model.get_correct_attn_implementation(implementation))
    return model


def install(model: Any, options: dict[str, Any]) -> None:
    """Makes `model` what its class in `classes` is: modules, hooks, classes and configuration."""
    compose = dict(options)
    attentions = _select(model, compose.pop("layers", None))
    made = {name: _compose(model, name, module, compose) for name, module in attentions.items()}
    for name, module in attentions.items():
        module.compose = made[name].train(module.training)
        module.register_forward_pre_hook(ComposeHeads(module), with_kwargs=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, Converted):
            module.__class__ = composed_class(type(module))
            _CAN_RECORD_REGISTRY[module] = module._can_record_outputs  # transformers looks them up by the name of the class
    if not isinstance(model.config, model.config_class):
        model.config.__class__ = model.config_class
    model.config.composition = options
    implementation = model.config._attn_implementation
    model.set_attn_implementation(
        model.get_correct_attn_implementation(
            implementation if implementation == "eager" or implementation.startswith("converted_") else None
        )
    )


def _select(model: PreTrainedModel, layers: list[str] | None) -> dict[str, nn.Module]:
    """The attention modules by name, all or those in `layers`.

    Names are those that the base model has, with or without its own, so that they hold for every class of a family.
    """
    prefix = f"{model.base_model_prefix}."
    attentions = {name.removeprefix(prefix): module for name, module in model.named_modules() if is_attention(module)}
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} cannot be converted: its attention does not go through transformers' attention interface"
        )
    if layers is None:
        return attentions
    chosen: dict[str, nn.Module] = {}
    for layer in layers:
        wanted = layer.removeprefix(prefix)
        found = {name: module for name, module in attentions.items() if f"{name}.".startswith(f"{wanted}.")}
        if not found:
            raise ValueError(f"layers: there is no attention at {layer!r}; there is at {', '.join(attentions)}")
        chosen |= found
    return chosen


def _compose(model: PreTrainedModel, name: str, module: Any, options: dict[str, Any]) -> Compose:
    heads = head_count(module)
    rank, groups = options.get("rank", 2), options.get("groups", 1)
    if groups >= 1 and rank > heads // groups:
        raise ValueError(f"rank={rank} is over the {heads // groups} heads that mix with each other in {name}")
    like = next(module.parameters())
    compose = Compose(module.config.hidden_size, heads, device=like.device, dtype=model.dtype, **options)
    compose.reset_to_identity()
    return compose
