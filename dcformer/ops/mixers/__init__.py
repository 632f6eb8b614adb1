"""The contract of a mixer, by which a backend other than the reference serves a call, and the register of mixers.

Adding one is one call of `register_mixer`. A mixer that mixes given scores derives from `dcformer.ops.driver.BlockMixer`, which
does the rest.

B batch, T queries, S keys, N heads, D head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dcformer.ops.composition import Composition


class Call(NamedTuple):
    """One call of `composed_attention`, checked, with defaults filled in and masks 4-D.

    `seed` is an int64 scalar on the CPU, given where `dropout_p` is above 0: a mixer draws the same mask for the same seed.
    `documents` [B, S] says which document each position is of; a key is seen by queries of its own only, if at all by any.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pre: Composition | None
    post: Composition | None
    attn_mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    window: int | None
    scale: float
    dropout_p: float
    documents: Tensor | None = None


def within_documents(mask: Tensor | None, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """A 4-D mask, or none, and besides only keys of the query's own document: [B, T] and [B, S] give [B, 1 or N, T, S].

    What has a negative number is padding and sees and is seen by nothing.
    """
    same = (of_queries[:, :, None] == of_keys[:, None, :]) & (of_keys >= 0)[:, None, :]
    if mask is None:
        return same[:, None]
    return mask & same[:, None] if mask.dtype == torch.bool else mask.masked_fill(~same[:, None], -math.inf)


class Mixer(Protocol):
    """One implementation of composed attention.

    Attributes:
        name: the backend's name for users.
        priority: `auto` takes the willing mixer with the highest one.
    """

    name: str
    priority: int

    def refuses(self, call: Call) -> str | None:
        """Why this mixer cannot serve the call, or `None` if it can."""

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """The output [B, N, T, Dv] in the dtype of the query, and the row statistics [B, N, T, 2].

        The statistics, in `mixing_dtype`, are the row's largest composed score and the sum of exp(score - largest), with which
        the backward makes the softmax again: two numbers and not one logarithm, since its rounding would scale a whole row. A
        row without visible keys has the output 0 and the statistics (0, 1).
        """

    def backward(self, call: Call, grad_out: Tensor, statistics: Tensor, mask_needs_grad: bool) -> list[Tensor]:
        """Gradients of query, key, value, the parts of pre and post that are there, and the mask where it needs one, in this
        order; any floating-point dtype will do."""


MIXERS: dict[str, Mixer] = {}


def register_mixer(mixer: Mixer) -> None:
    """Makes a mixer known as the backend `mixer.name`."""
    if mixer.name in MIXERS or mixer.name in ("auto", "reference"):
        raise ValueError(f"mixer.name={mixer.name!r} is taken; choose another name")
    MIXERS[mixer.name] = mixer
