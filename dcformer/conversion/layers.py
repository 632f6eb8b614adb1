"""Which layers are converted, and whether the options fit them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def choose_layers(attentions: Collection[str], layers: list[str] | None, prefix: str = "") -> set[str]:
    """The names that are in `layers` or below one of them; all for `None`.

    Args:
        attentions: names of modules.
        layers: names of these or of modules that hold them, with `prefix` or without.
        prefix: what `attentions` leave out.

    Raises:
        ValueError: a name stands for no attention, or there are none.
    """
    if layers is None:
        return set(attentions)
    chosen: set[str] = set()
    for layer in layers:
        wanted = f"{layer}.".removeprefix(prefix)  # nothing for the base model itself
        found = {name for name in attentions if f"{name}.".startswith(wanted)}
        if not found:
            raise ValueError(f"layers: there is no attention at {layer!r}; there is at {', '.join(attentions)}")
        chosen |= found
    if not chosen:
        raise ValueError("layers=[] leaves nothing to convert; give names of modules, or None for all")
    return chosen


def is_composition(name: str) -> bool:
    """Whether a parameter of that name is one of the mixing."""
    return ".compose." in name


def check_heads(name: str, heads: int, options: dict[str, Any]) -> None:
    """Refuses a rank that the heads of a layer cannot have; what else is wrong with the options `Compose` says."""
    rank, groups = options.get("rank", 2), options.get("groups", 1)
    if groups >= 1 and rank > heads // groups:
        raise ValueError(f"rank={rank} is over the {heads // groups} heads that mix with each other in {name}")
