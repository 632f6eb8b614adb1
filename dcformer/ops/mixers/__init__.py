"""The contract between the driver and a mixer, and the register of mixers.

A mixer turns the scores of one block of queries into attention weights (`mix_forward`), and gradients of the weights
into gradients of the scores (`mix_backward`). The driver does the rest. Adding a mixer is one call of `register_mixer`.

B batch, C queries of the block, S keys that the block sees, N heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dcformer.ops.composition import Composition


class Request(NamedTuple):
    """The arguments of one call of `composed_attention`, by which a mixer tells whether it can serve."""

    query: Tensor
    key: Tensor
    value: Tensor
    pre: Composition | None = None
    post: Composition | None = None
    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    dropout_p: float = 0.0


class Workspace:
    """Buffers that live for one call, so that blocks do not allocate: fresh pages cost more than the mixing."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device):
        self._elements, self._dtype, self._device = elements, dtype, device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A contiguous tensor of at most one block's size with undefined content; the same memory for the same name."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self._elements, dtype=self._dtype, device=self._device)
        return self._buffers[name][: math.prod(shape)].view(shape)


@dataclass
class Block:
    """What belongs to one block of queries, as views into the whole. Floats have the dtype of the scores.

    Attributes:
        pre, post: compositions with `query` [B, C, 2R+1, N] and `key` [B, S, 2R+1, N], or `None`. Rows of `base` and
            `query` are contiguous; `key` has stride 1 along S.
        mask: bool (True = visible) or float (added), [B or 1, N or 1, C or 1, S or 1], or `None`.
        lower, upper: query c sees only the keys j with c + lower <= j < c + upper; `None` means no bound.
        workspace: buffers for the mixer's own use.
    """

    pre: Composition | None
    post: Composition | None
    mask: Tensor | None
    lower: int | None
    upper: int | None
    workspace: Workspace


@dataclass
class BlockGrads:
    """Where `mix_backward` adds its gradients: views of accumulators, with shapes, layout and dtype of the block's parts."""

    pre: Composition | None
    post: Composition | None
    mask: Tensor | None


class Mixer(Protocol):
    """One implementation of the mixing.

    Scores come already scaled, [B, N, C, S], in float32, or in float64 for float64 inputs. Their rows may be padded: they are a
    slice [..., :S] of something contiguous. Both functions may overwrite scores and dweights, and return them or buffers of the
    workspace; a result laid out like the scores saves a copy.

    Attributes:
        name: the backend's name for users.
        priority: `auto` takes the willing mixer with the highest one.
    """

    name: str
    priority: int

    def refuses(self, request: Request) -> str | None:
        """Why this mixer cannot serve the request, or `None` if it can."""

    def mix_forward(self, scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Compose, mask, softmax, compose: returns the weights [B, N, C, S] and the row statistics [B, N, C, 2].

        The statistics are the row's largest composed score and the sum of exp(score - largest), with which the backward makes
        the softmax again: two numbers and not one logarithm, since its rounding would scale a whole row. A row without visible
        keys has weights 0 and the statistics (0, 1).
        """

    def mix_backward(
        self, scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
    ) -> tuple[Tensor, Tensor]:
        """Returns the weights again and the gradient of the scores, both [B, N, C, S]; adds to `grads`."""


MIXERS: dict[str, Mixer] = {}


def register_mixer(mixer: Mixer) -> None:
    """Makes a mixer known as the backend `mixer.name`."""
    if mixer.name in MIXERS or mixer.name in ("auto", "reference"):
        raise ValueError(f"mixer.name={mixer.name!r} is taken; choose another name")
    MIXERS[mixer.name] = mixer
