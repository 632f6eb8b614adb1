"""Window patterns: which layers are local (L) and which global (G)."""

from __future__ import annotations

import re
from itertools import chain, cycle, islice, repeat

_LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}


def layer_types(pattern: str | list[str], num_layers: int) -> list[str]:
    """A window pattern as transformers' layer types, repeated to `num_layers`.

    Args:
        pattern: letters, each with a count if repeated, as in "G", "LG", "LGLL" or "LGL6", or a list of them.
        num_layers: number of layers.

    Raises:
        ValueError: the pattern is none.
    """
    text = "".join(map(str, pattern)) if isinstance(pattern, (str, list)) else ""
    if not re.fullmatch(r"([LG]([1-9]\d*)?)+", text):
        raise ValueError(
            f"window_pattern={pattern!r} is unknown; write L (local) and G (global), each with a count if repeated, "
            'as in "G", "LG", "LGLL" or "LGL6", or a list of them'
        )
    letters = chain.from_iterable(repeat(letter, int(count or 1)) for letter, count in re.findall(r"([LG])(\d*)", text))
    return [_LAYER_TYPES[letter] for letter in islice(cycle(letters), num_layers)]
