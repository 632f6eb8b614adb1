"""The configuration of DCFormer. E hidden size, N heads."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict
from transformers.models.auto.configuration_auto import AutoConfig

from dcformer.models.configuration import DecoderConfig


@strict
class DCFormerConfig(DecoderConfig):
    """What a DCFormer is made of: the arguments of `DecoderConfig`, and those here.

    Sizes: the paper's 405M, 834M, 1.4B, 2.8B, 6.9B, and 1M, 3M, 10M, 25M for a laptop.

    Args:
        intermediate_size: width of the SwiGLU MLP.
        mgate_dim: how many equal slices of the MLP's activations have a gate of their own, a softmax over all gates; `None`: no
            gates.
        rms_norm_eps: epsilon of the norms of hidden states.
    """

    model_type = "dcformer"
    modeling = "dcformer.models.dcformer.modeling_dcformer"
    # MLP widths are 8/3 E in steps of 128 for the paper's (arXiv 2405.08553, Section 4.1). The small ones are named after their
    # parameters without embeddings.
    sizes = {  # noqa: RUF012
        "1M": (4, 128, 4, 448),
        "3M": (6, 192, 6, 512),
        "10M": (8, 320, 10, 864),
        "25M": (8, 512, 8, 1376),
        "405M": (24, 1024, 16, 2816),
        "834M": (24, 1536, 24, 4096),
        "1.4B": (24, 2048, 32, 5504),
        "2.8B": (32, 2560, 32, 6912),
        "6.9B": (32, 4096, 32, 11008),
    }

    intermediate_size: int = 2816
    rms_norm_eps: float = 1e-6
    mgate_dim: int | None = None

    def _check_shapes(self) -> None:
        super()._check_shapes()
        if self.mgate_dim is not None and (self.mgate_dim < 1 or self.intermediate_size % self.mgate_dim):
            raise ValueError(f"mgate_dim={self.mgate_dim} must divide intermediate_size={self.intermediate_size}, or be None")


AutoConfig.register("dcformer", DCFormerConfig)
