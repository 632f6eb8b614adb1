"""Composable heads in plain PyTorch: `nn.MultiheadAttention` anywhere inside a module becomes `dcformer.DCMHA`, and back."""

from __future__ import annotations

from typing import Any

from torch import nn

from dcformer.conversion.layers import check_heads, choose_layers
from dcformer.nn import DCMHA, Compose


def convert_modules(model: nn.Module, layers: list[str] | None, options: dict[str, Any]) -> None:
    """`dcformer.convert` for modules that are no models of transformers."""
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError("model is an nn.MultiheadAttention, which cannot change in place; take DCMHA.from_mha(model)")
    if any(isinstance(module, Compose) for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} has composable heads already")
    # A module that stands in several places stays one.
    found = {name: m for name, m in model.named_modules(remove_duplicate=False) if type(m) is nn.MultiheadAttention}
    if not found:
        inner = [name for name, module in model.named_modules() if hasattr(module, "set_attn_implementation")]
        if inner:
            raise ValueError(f"{type(model).__name__} holds a model of transformers; convert that one, {inner[0]!r}")
        raise ValueError(
            f"{type(model).__name__} cannot be converted: it holds no nn.MultiheadAttention and is no model of transformers"
        )
    names = choose_layers(found, layers)
    chosen = {name: module for name, module in found.items() if name in names}
    for name, module in chosen.items():
        check_heads(name, module.num_heads, options)
    made = {module: DCMHA.from_mha(module, **options) for module in set(chosen.values())}
    for name, module in chosen.items():
        model.set_submodule(name, made[module])


def restore_modules(model: nn.Module) -> None:
    """`dcformer.unconvert` for modules that are no models of transformers."""
    found = {name: module for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, DCMHA)}
    if not found or "" in found:
        raise ValueError(f"this {type(model).__name__} is not converted")
    for name, module in found.items():
        if module.window is not None or not isinstance(module.q_norm, nn.Identity) or module.num_kv_heads != module.num_heads:
            raise ValueError(f"{name} has a window, norms or fewer key/value heads, which nn.MultiheadAttention does not have")
    made = {module: _plain(module) for module in set(found.values())}
    for name, module in found.items():
        model.set_submodule(name, made[module])


def _plain(module: DCMHA) -> nn.MultiheadAttention:
    like = module.out_proj.weight
    plain = nn.MultiheadAttention(
        module.embed_dim, module.num_heads, module.dropout, module.in_proj_bias is not None, module.bias_k is not None,
        module.add_zero_attn, module.kdim, module.vdim, module.batch_first, like.device, like.dtype,
    )  # fmt: skip
    for name, _ in list(plain.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(plain.get_submodule(owner), last, module.get_parameter(name))
    return plain.train(module.training)
