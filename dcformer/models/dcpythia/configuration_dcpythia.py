"""The configuration of DCPythia. E hidden size, N heads."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.auto.configuration_auto import AutoConfig

from dcformer.models.configuration import DecoderConfig


@strict
class DCPythiaConfig(DecoderConfig):
    """What a DCPythia is made of: the arguments of `DecoderConfig`, and those here.

    Of each head's channels a quarter is rotated, unless `rope_parameters` has another "partial_rotary_factor".

    Sizes: the paper's 2.8B and 6.9B.

    Args:
        intermediate_size: width of the GELU MLP.
        qk_norm: whether each head's queries and keys are normalised before the rotation.
        layer_norm_eps: epsilon of the norms of hidden states.
        use_parallel_residual: whether the MLP reads what attention reads, or what attention gave.
        use_linear_bias: whether the linear layers of attention and MLP have biases.
    """

    model_type = "dcpythia"
    modeling = "dcformer.models.dcpythia.modeling_dcpythia"
    sizes = {  # noqa: RUF012
        "2.8B": (32, 2560, 32, 10240),
        "6.9B": (32, 4096, 32, 16384),
    }

    intermediate_size: int = 4096
    qk_norm: bool = True
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    use_linear_bias: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**{"partial_rotary_factor": 0.25, **kwargs})


AutoConfig.register("dcpythia", DCPythiaConfig)
