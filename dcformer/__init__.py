"""Dynamically Composable Multi-Head Attention (arXiv 2405.08553). Names load on first use; the operator needs torch only."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcformer import _register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dcformer.conversion.convert import convert, unconvert
    from dcformer.models.dcformer import DCFormerConfig, DCFormerForCausalLM, DCFormerModel
    from dcformer.models.dcpythia import DCPythiaConfig, DCPythiaForCausalLM, DCPythiaModel
    from dcformer.nn import DCMHA, Compose
    from dcformer.ops import Composition, composed_attention

_HOME = {
    "Composition": "dcformer.ops",
    "composed_attention": "dcformer.ops",
    "Compose": "dcformer.nn",
    "DCMHA": "dcformer.nn",
    "DCFormerConfig": "dcformer.models.dcformer",
    "DCFormerModel": "dcformer.models.dcformer",
    "DCFormerForCausalLM": "dcformer.models.dcformer",
    "DCPythiaConfig": "dcformer.models.dcpythia",
    "DCPythiaModel": "dcformer.models.dcpythia",
    "DCPythiaForCausalLM": "dcformer.models.dcpythia",
    "convert": "dcformer.conversion.convert",
    "unconvert": "dcformer.conversion.convert",
}

__all__ = [
    "DCMHA",
    "Compose",
    "Composition",
    "DCFormerConfig",
    "DCFormerForCausalLM",
    "DCFormerModel",
    "DCPythiaConfig",
    "DCPythiaForCausalLM",
    "DCPythiaModel",
    "composed_attention",
    "convert",
    "unconvert",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'dcformer' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


_register.install()
