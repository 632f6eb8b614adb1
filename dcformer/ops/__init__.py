"""The operator: composed attention, its backends and how to add one. Imports nothing but torch."""

from dcformer.ops.api import Explanation, composed_attention, explain
from dcformer.ops.composition import Composition
from dcformer.ops.driver import Block, BlockGrads, BlockMixer
from dcformer.ops.mixers import Call, Mixer, register_mixer
from dcformer.ops.reference import composed_weights

__all__ = [
    "Block",
    "BlockGrads",
    "BlockMixer",
    "Call",
    "Composition",
    "Explanation",
    "Mixer",
    "composed_attention",
    "composed_weights",
    "explain",
    "register_mixer",
]
