"""DCFormer (arXiv 2405.08553): a LLaMA-style decoder whose attention heads are composed. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcformer.models.dcformer.configuration_dcformer import DCFormerConfig
    from dcformer.models.dcformer.modeling_dcformer import DCFormerForCausalLM, DCFormerModel, DCFormerPreTrainedModel

_HOME = {
    "DCFormerConfig": "configuration_dcformer",
    "DCFormerForCausalLM": "modeling_dcformer",
    "DCFormerModel": "modeling_dcformer",
    "DCFormerPreTrainedModel": "modeling_dcformer",
}

__all__ = ["DCFormerConfig", "DCFormerForCausalLM", "DCFormerModel", "DCFormerPreTrainedModel"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
