"""`convert` gives a pretrained transformer composable heads in place, `unconvert` takes them away again."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

from torch import nn

from dcformer.conversion.layers import is_composition

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
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
) -> Model:
    """Gives a transformer composable heads, in place (arXiv 2405.08553, Section 3). Its outputs stay until it is trained.

    Works for every model of transformers whose attention modules go through transformers' attention interface: decoders with
    any cache, encoders, encoder-decoders, vision models. In cross-attention the query-wise weights come from the decoder's
    states, the key-wise ones from the encoder's. The model's class becomes a subclass of its own, `DCLlamaForCausalLM` for
    example, which saves and loads with the usual methods and the Auto classes after `import dcformer`.

    In other modules every `nn.MultiheadAttention` is replaced by a `dcformer.DCMHA` with a copy of its parameters.

    See `Compose.reset_to_identity` for how the new parameters start. Half of them (`dw1` and the w1 half of `qkw`) have a
    gradient of exactly zero at the first step, being behind a factor that is zero, and learn from the second step on.

    Args:
        model: what to convert: the whole model, on the device and in the dtype in which it is used.
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
            name, or too few heads for `rank` or `groups`; the options leave nothing to mix.
    """
    if trainable not in ("all", "composition"):
        raise ValueError(f"trainable={trainable!r} is unknown; choose 'all' or 'composition'")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be an nn.Module")
    options: dict[str, Any] = {
        "rank": rank, "groups": groups, "query_wise": query_wise, "key_wise": key_wise, "gates": gates, "static": static,
        "pre": pre, "post": post,
    }  # fmt: skip
    if not (pre or post) or not (static or ((query_wise or key_wise) and (rank or gates))):
        raise ValueError(f"nothing is mixed with {', '.join(f'{name}={value}' for name, value in options.items())}")
    names = None if layers is None else [layers] if isinstance(layers, str) else list(layers)
    if _is_of_transformers(model):
        from dcformer.conversion.models import convert_model

        convert_model(model, names, options)  # type: ignore[arg-type]
    else:
        from dcformer.conversion.modules import convert_modules

        convert_modules(model, names, options)
    if trainable == "composition":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_composition(name))
    return model


def unconvert(model: Model) -> Model:
    """Takes the composition of a converted model away, in place: the base model with its weights as they are now.

    What is trainable stays as it is: after `trainable="composition"`, nothing.

    Args:
        model: the model that was converted, not a part of it.

    Returns:
        `model`.

    Raises:
        ValueError: the model is not converted.
    """
    if _is_of_transformers(model):
        from dcformer.conversion.models import restore_model

        restore_model(model)
    else:
        from dcformer.conversion.modules import restore_modules

        restore_modules(model)
    return model


def _is_of_transformers(model: nn.Module) -> Any:
    if "transformers" not in sys.modules:  # plain modules do not need it
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)
