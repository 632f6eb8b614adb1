"""The `triton` backend: a block's scores are mixed by GPU kernels, the products stay the vendor's.

Triton is imported at the first call. With TRITON_INTERPRET=1 the kernels run on the CPU, slowly, for tests.

B batch, C queries of the block, S keys, N heads.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from dcformer.ops.driver import Block, BlockGrads, BlockMixer
from dcformer.ops.mixers import Call

# Heads of a group that a thread's registers hold; with static mixing a program's length grows with their square.
_MOST_HEADS, _MOST_HEADS_STATIC = 64, 32


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonMixer(BlockMixer):
    """See `BlockMixer`."""

    name = "triton"
    priority = 5  # behind the CPU kernel, which matters to the interpreter alone

    def refuses(self, call: Call) -> str | None:
        """Why not: no GPU that Triton compiles for, no Triton, float64, or groups with too many heads."""
        device = call.query.device
        if device.type != "cuda" and not (device.type == "cpu" and interprets()):
            return f"it runs on CUDA devices and query is on {device}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if device.type == "cuda" and torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
            return f"it needs compute capability 8.0 and {torch.cuda.get_device_name(device)} has less"
        if call.query.dtype == torch.float64:
            return "it mixes in float32, and query is float64"
        for name, composition in (("pre", call.pre), ("post", call.post)):
            if composition is not None:
                heads = call.query.shape[1] // composition.groups
                most = _MOST_HEADS if composition.base is None else _MOST_HEADS_STATIC
                if heads > most:
                    static = "" if composition.base is None else " with static mixing"
                    return f"it takes at most {most} heads a group{static}, and {name} has {heads}"
        return None

    def mix_forward(self, scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `BlockMixer.mix_forward`."""
        from dcformer.ops.mixers.triton import launch

        return launch.mix_forward(scores, block)

    def mix_backward(
        self, scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
    ) -> tuple[Tensor, Tensor]:
        """See `BlockMixer.mix_backward`."""
        from dcformer.ops.mixers.triton import launch

        return launch.mix_backward(scores, dweights, statistics, block, grads)
