"""Composable heads for pretrained transformers: `convert` and `unconvert`."""

from dcformer.conversion.convert import convert, unconvert

__all__ = ["convert", "unconvert"]
