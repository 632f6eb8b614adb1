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

_INSTALLED = importlib.util.find_spec("triton") is not None  # looked up once: the compiler cannot trace it
_MOST_HEADS = 64  # of a group, which a warp's registers hold


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonMixer(BlockMixer):
    """See `BlockMixer`."""

    name = "triton"
    priority = -1  # only by name, as long as it has not been measured on a GPU
    alignment = 16

    def refuses(self, call: Call) -> str | None:
        """Why not: no GPU of NVIDIA's since sm_80, no Triton, float64, or groups that are too large or differ."""
        device = call.query.device
        if device.type != "cuda" and not (device.type == "cpu" and interprets()):
            return f"it runs on CUDA devices and query is on {device}"
        if not _INSTALLED:
            return "the package triton is not installed"
        if device.type == "cuda":
            about = torch.cuda.get_device_properties(device)
            if torch.version.cuda is None:
                return f"its kernels are for NVIDIA's GPUs and {about.name} is another's"
            if about.major < 8:
                return f"it needs compute capability 8.0 and {about.name} has less"
        if call.query.dtype == torch.float64:
            return "it mixes in float32, and query is float64"
        groups = {name: c.groups for name, c in (("pre", call.pre), ("post", call.post)) if c is not None}
        if len(set(groups.values())) > 1:
            return (
                f"it takes equally many groups before and after the softmax, and pre has {groups['pre']}, post {groups['post']}"
            )
        for name, count in groups.items():
            if call.query.shape[1] // count > _MOST_HEADS:
                return f"it takes at most {_MOST_HEADS} heads a group, and {name} has {call.query.shape[1] // count}"
        return None

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """See `Mixer.forward`. Few queries have kernels of their own, which make the products too."""
        from dcformer.ops.mixers.triton import launch_decoding

        with torch.cuda.device_of(call.query):  # Triton launches on the current device
            return launch_decoding.forward(call) if launch_decoding.serves(call) else super().forward(call)

    def mix_forward(self, scores: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """See `BlockMixer.mix_forward`."""
        from dcformer.ops.mixers.triton import launch

        with torch.cuda.device_of(scores):
            return launch.mix_forward(scores, block)

    def mix_backward(
        self, scores: Tensor, dweights: Tensor, statistics: Tensor, block: Block, grads: BlockGrads
    ) -> tuple[Tensor, Tensor]:
        """See `BlockMixer.mix_backward`."""
        from dcformer.ops.mixers.triton import launch

        with torch.cuda.device_of(scores):
            return launch.mix_backward(scores, dweights, statistics, block, grads)
