"""The `cpu` backend: the mixing as a C++ kernel, compiled at first use.

B batch, C queries of the block, S keys, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import Block, BlockGrads, Request
from dcformer.ops.mixers.cpu import build


class CpuMixer:
    """See `dcformer.ops.mixers.Mixer`."""

    name = "cpu"
    priority = 10

    def refuses(self, request: Request) -> str | None:
        """Why not: the tensors are elsewhere, in float64, or the kernel cannot be built here."""
        if request.query.device.type != "cpu":
            return f"it runs on the CPU and query is on {request.query.device}"
        if request.query.dtype == torch.float64:
            return "it computes in float32 and query is float64"
        failure = build.why_not()
        return None if failure is None else f"the kernel could not be built: {failure}"

    def mix_forward(self, scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `Mixer.mix_forward`."""
        statistics = scores.new_empty(*scores.shape[:3], 2)
        pre, post = block.pre or Composition(), block.post or Composition()
        torch.ops.dcformer_cpu.mix_forward(
            scores, statistics, *pre[:3], *post[:3], block.mask, pre.groups, post.groups, block.lower, block.upper
        )
        return scores, statistics

    def mix_backward(
        self, scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
    ) -> tuple[Tensor, Tensor]:
        """See `Mixer.mix_backward`."""
        shape = (*scores.shape[:3], scores.stride(2))
        probabilities, weights = (block.workspace.take(name, shape) for name in ("probabilities", "weights"))
        pre, post = block.pre or Composition(), block.post or Composition()
        dpre, dpost = grads.pre or Composition(), grads.post or Composition()
        torch.ops.dcformer_cpu.mix_backward(
            scores, dweights, statistics, probabilities, weights, *pre[:3], *post[:3], block.mask,
            *dpre[:3], *dpost[:3], grads.mask, pre.groups, post.groups, block.lower, block.upper,
        )  # fmt: skip
        return weights[..., : scores.shape[3]], dweights
