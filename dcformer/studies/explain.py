"""A page on what the heads of a model do on a text: one HTML file that needs no network.

L layers, T tokens, N heads.
"""

from __future__ import annotations

import base64
import html
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dcformer.models.attention import AttentionInputs
from dcformer.studies.heads import attention_inputs, check_has_heads, maps, mixing

# The page grows with the square of the text: a model of 32 layers and heads takes about 50 MB for so many tokens.
MAX_TOKENS = 128
_TEMPLATE = Path(__file__).with_name("explain.html")


def explain(model: Any, tokenizer: Any, text: str, *, checkpoint: str) -> str:
    """A page where one picks layer, head and two tokens, and sees attention with and without composition, and how heads mix.

    Args:
        model: a DCFormer or DCPythia, composed or plain.
        tokenizer: the model's.
        text: what it reads; 1 to `MAX_TOKENS` tokens.
        checkpoint: what the page calls the model.

    Returns:
        HTML with scripts, styles and data inside. Its data is JSON in the element `data`: `tokens`; `heads`, N; and `layers`,
        each with `raw` and `composed`, the attention at visible and hidden keys up to the query's, head by head and row by row
        [N, T (T + 1) / 2], and with `pre` and `post`, `None` in plain models: `base` [N, N], `query` and `key` [T, N, N] of
        `dcformer.studies.heads.Mixing`. Numbers are whole 16-bit ones, little-endian, in base64, to be multiplied by `scale`.

    Raises:
        ValueError: the model is of another kind, or the text has too few or too many tokens, or none that the model knows.
    """
    check_has_heads(model)
    ids = tokenizer.encode(text)
    if not 1 <= len(ids) <= MAX_TOKENS:
        raise ValueError(f"text has {len(ids)} tokens; it must have 1 to {MAX_TOKENS}")
    layers = attention_inputs(model, torch.tensor([ids], device=model.device))
    data = {
        "tokens": tokenizer.batch_decode([[token] for token in ids]),
        "heads": model.config.num_attention_heads,
        "layers": [_layer(inputs) for inputs in layers],
    }
    # In a script element no "<" may stand that could end it.
    parts = {"data": json.dumps(data).replace("<", "\\u003c"), "checkpoint": html.escape(checkpoint)}
    return re.sub(r"{{(\w+)}}", lambda place: parts[place[1]], _TEMPLATE.read_text(encoding="utf-8"))


def _layer(inputs: AttentionInputs) -> dict[str, Any]:
    found = maps(inputs)
    (_, heads, length, _) = found.raw.shape
    row, column = torch.tril_indices(length, length)
    layer: dict[str, Any] = {name: _packed(getattr(found, name)[0][:, row, column]) for name in ("raw", "composed")}
    for side in ("pre", "post"):
        composition = getattr(inputs, side)
        matrices = None if composition.is_identity else mixing(composition, 1, length, heads)
        layer[side] = matrices and {
            "base": _packed(matrices.base),
            "query": _packed(matrices.query[0]),
            "key": _packed(matrices.key[0]),
        }
    return layer


def _packed(x: Tensor) -> dict[str, Any]:
    scale = x.abs().max().item() / 32767 or 1.0
    whole = (x / scale).round().to(torch.int16).cpu().numpy().astype("<i2")
    return {"scale": scale, "data": base64.b64encode(whole.tobytes()).decode()}
