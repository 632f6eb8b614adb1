"""DCPythia (arXiv 2405.08553): a GPT-NeoX-style decoder whose attention heads are composed. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcformer.models.dcpythia.configuration_dcpythia import DCPythiaConfig
    from dcformer.models.dcpythia.modeling_dcpythia import DCPythiaForCausalLM, DCPythiaModel, DCPythiaPreTrainedModel

_HOME = {
    "DCPythiaConfig": "configuration_dcpythia",
    "DCPythiaForCausalLM": "modeling_dcpythia",
    "DCPythiaModel": "modeling_dcpythia",
    "DCPythiaPreTrainedModel": "modeling_dcpythia",
}

__all__ = ["DCPythiaConfig", "DCPythiaForCausalLM", "DCPythiaModel", "DCPythiaPreTrainedModel"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
