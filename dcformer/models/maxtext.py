"""Parameters of the authors' MaxText training code (JAX) as ours.

What their sources fix (github Caiyun-AI/DCFormer, `jax/MaxText` and `pytorch/dcformer/maxtext2torch.py`):

- `decoder.layers` scans over blocks. A block holds the P layers of one turn of the window pattern, and its names end in the
  sub-layer's number: layer l is sub-layer l % P of block l // P. The blocks are axis 1 of every array.
- Kernels are [in, out], with heads and head dim as axes of their own: query, key and value [E, N, D], out [N, D, E]. Rotary
  pairs are halves, as in the released checkpoints and here, so that no rows move.
- `dw1`, `qkw`, `dd` and the static `w` have the shapes of `dcformer.Compose`; `dw1` and `dd` are kernels of linear layers.
- RMS norms keep the factor itself, not the factor less one. The MLP is wo(silu(wi_0 x) * (wi_1 x)), its gates `mgate`.
- GELU in the composition is the tanh approximation there, the exact one in the released PyTorch code and here.

Rope base, epsilons and window sizes are not in the tree: the configuration says them. DCPythia was not trained with this code.

B blocks, P layers a block, E hidden size, N heads, K key/value heads, D head dim, F width of the MLP, A its gates,
V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dcformer.models.dcformer import DCFormerForCausalLM

# Name there, its axes; name here, its axes. Here an axis may join several of theirs.
_TOP = (
    ("token_embedder.embedding", "VE", "model.embed_tokens.weight", "V E"),
    ("decoder.decoder_norm.scale", "E", "model.norm.weight", "E"),
    ("decoder.logits_dense.kernel", "EV", "lm_head.weight", "V E"),
)
# In a layer, where {} is the sub-layer; the axis of the blocks is left out.
_LAYER = (
    ("pre_self_attention_layer_norm_{}.scale", "E", "input_layernorm.weight", "E"),
    ("self_attention_{}.query.kernel", "END", "self_attn.q_proj.weight", "ND E"),
    ("self_attention_{}.key.kernel", "EKD", "self_attn.k_proj.weight", "KD E"),
    ("self_attention_{}.value.kernel", "EKD", "self_attn.v_proj.weight", "KD E"),
    ("self_attention_{}.out.kernel", "NDE", "self_attn.o_proj.weight", "E ND"),
    ("self_attention_{}.q_norm.scale", "D", "self_attn.q_norm.weight", "D"),
    ("self_attention_{}.k_norm.scale", "D", "self_attn.k_norm.weight", "D"),
    ("self_attention_{}.AttentionOp_0.dyn_w_proj.dw1.kernel", "EGCI", "self_attn.compose.dynamic.dw1", "E G C I"),
    ("self_attention_{}.AttentionOp_0.dyn_w_proj.qkw", "GCIRM", "self_attn.compose.dynamic.qkw", "G C I R M"),
    ("self_attention_{}.AttentionOp_0.dyn_w_proj.dd.kernel", "EGM", "self_attn.compose.dynamic.dd", "E G M"),
    ("self_attention_{}.AttentionOp_0.pre_proj.w", "GML", "self_attn.compose.pre_base", "G M L"),
    ("self_attention_{}.AttentionOp_0.post_proj.w", "GML", "self_attn.compose.post_base", "G M L"),
    ("post_self_attention_layer_norm_{}.scale", "E", "post_attention_layernorm.weight", "E"),
    ("mlp_{}.wi_0.kernel", "EF", "mlp.gate_proj.weight", "F E"),
    ("mlp_{}.wi_1.kernel", "EF", "mlp.up_proj.weight", "F E"),
    ("mlp_{}.wo.kernel", "FE", "mlp.down_proj.weight", "E F"),
    ("mlp_{}.mgate.kernel", "EA", "mlp.mgate.weight", "A E"),
)


@dataclass(frozen=True)
class _Array:
    """What is wanted of an array of theirs, and the parameters that are made of it, one a block."""

    targets: list[str]
    shape: tuple[int, ...]
    axes: str
    axes_here: str
    stacked: bool

    def parameters(self, array: Tensor) -> Iterator[tuple[str, Tensor]]:
        for target, part in zip(self.targets, array.unbind(1) if self.stacked else [array], strict=True):
            sizes = dict(zip(self.axes, part.shape, strict=True))
            part = part.permute([self.axes.index(axis) for axis in self.axes_here.replace(" ", "")])
            part = part.reshape([math.prod(sizes[axis] for axis in joined) for joined in self.axes_here.split()])
            yield target, part.contiguous()  # a view would keep all of the array


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested tree by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def state_dict_from_maxtext(parameters: Mapping[str, np.ndarray], model: DCFormerForCausalLM) -> dict[str, Tensor]:
    """The parameters of a MaxText training checkpoint as a state dict of ours. One array is read at a time.

    Args:
        parameters: arrays by dotted name ("decoder.decoder_norm.scale"), as `flattened` and `OrbaxParameters` give them.
        model: whose parameters are wanted; the meta device will do.

    Returns:
        All of `model.state_dict()`, contiguous, in the widest dtype of the tree: MaxText may keep `qkw` narrower than the rest.

    Raises:
        ValueError: arrays that are missing, unknown or of the wrong shape, all named; layers or windows that do not repeat with
            the blocks of the tree; a model that such a tree cannot be.
    """
    arrays = _wanted(parameters, model)
    problems = [f"{name} is missing" for name in sorted(arrays.keys() - set(parameters))]
    problems += [f"{name} is unknown" for name in sorted(set(parameters) - arrays.keys())]
    _raise(problems)
    state: dict[str, Tensor] = {}
    for name, wanted in arrays.items():
        array = parameters[name]
        if array.shape != wanted.shape:
            problems.append(f"{name} has shape {list(array.shape)} in place of {list(wanted.shape)}")
        elif not problems:
            state.update(wanted.parameters(_tensor(array)))
    _raise(problems)
    widest = reduce(torch.promote_types, {tensor.dtype for tensor in state.values()})
    return {name: tensor.to(widest) for name, tensor in state.items()}


def _wanted(names: Iterable[str], model: DCFormerForCausalLM) -> dict[str, _Array]:
    """The arrays of a tree for `model`, with as many layers a block as `names` tell."""
    config = model.config
    sub_layers = [int(number) for name in names for number in re.findall(r"^decoder\.layers\.self_attention_(\d+)\.", name)]
    period, layers = 1 + max(sub_layers, default=0), config.num_hidden_layers
    if layers % period:
        raise ValueError(f"num_hidden_layers={layers} must be a multiple of {period}, the layers a block of the MaxText tree")
    if config.layer_types != config.layer_types[:period] * (layers // period):
        raise ValueError(
            f"window_pattern={config.window_pattern!r} must repeat after {period} layers, those a block of the MaxText tree"
        )
    if config.tie_word_embeddings:
        raise ValueError("tie_word_embeddings=True must be False: a MaxText tree is read with an output layer of its own")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    heads = {"N": config.num_attention_heads, "K": config.num_key_value_heads, "D": config.head_dim}
    arrays: dict[str, _Array] = {}

    def want(theirs: str, axes: str, targets: list[str], axes_here: str, stacked: bool) -> None:
        if targets[0] not in shapes:
            return
        sizes: dict[str, Any] = heads | dict(zip(axes_here.split(), shapes[targets[0]], strict=True))
        shape = [sizes[axis] for axis in axes]
        if stacked:
            shape.insert(1, len(targets))
        arrays[theirs] = _Array(targets, tuple(shape), axes, axes_here, stacked)

    for theirs, axes, ours, axes_here in _TOP:
        want(theirs, axes, [ours], axes_here, stacked=False)
    for i in range(period):
        for theirs, axes, ours, axes_here in _LAYER:
            targets = [f"model.layers.{layer}.{ours}" for layer in range(i, layers, period)]
            want(f"decoder.layers.{theirs.format(i)}", axes, targets, axes_here, stacked=True)
    unmet = shapes.keys() - {target for wanted in arrays.values() for target in wanted.targets}
    if unmet:
        raise ValueError(f"a MaxText tree has nothing for the parameters {', '.join(sorted(unmet))} of this configuration")
    return arrays


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.name == "bfloat16":  # torch does not know numpy's extension types
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _raise(problems: list[str]) -> None:
    if problems:
        raise ValueError(f"the MaxText tree does not fit the configuration: {'; '.join(problems)}")
