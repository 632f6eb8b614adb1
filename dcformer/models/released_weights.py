"""The parameters of the released checkpoints as transformers' conversions: loaded by them, saved by their reverse."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Split, WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel

from dcformer.models.released import DYNAMIC, LAYER, MLP, NAMES, QKV


class _Channels(ConversionOps):
    """Four channels there, two here where only queries mix heads: the keys' two are not loaded, and saved as zeros."""

    def __init__(self, dim: int, saving: bool = False):
        self.dim, self.saving = dim, saving

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """One tensor to one."""
        (tensor,) = (t[0] if isinstance(t, list) else t for t in input_dict.values())
        compose = kwargs["config"].compose
        if compose is not None and not compose["key_wise"]:
            tensor = self._widened(tensor) if self.saving else self._narrowed(tensor)
        return {target_patterns[0]: tensor}

    def _narrowed(self, tensor: Tensor) -> Tensor:
        sides = tensor.unflatten(self.dim, (2, 2, -1))  # pre and post, query and key, the rest
        return sides.select(self.dim + 1, 0).flatten(self.dim, self.dim + 1).contiguous()

    def _widened(self, tensor: Tensor) -> Tensor:
        queries = tensor.unflatten(self.dim, (2, -1))
        return torch.stack([queries, torch.zeros_like(queries)], self.dim + 1).flatten(self.dim, self.dim + 2)

    @property
    def reverse_op(self) -> _Channels:
        return _Channels(self.dim, not self.saving)


def _conversions(model_type: str, prefix: str) -> list[WeightConverter | WeightRenaming]:
    """From there to here. `prefix` is that of the decoder's parameters: none for a decoder without output layer."""
    names = [(theirs, ours.replace("model.", prefix)) for theirs, ours in NAMES]
    renamings = [(f"^{re.escape(theirs)}\\.", f"^{re.escape(ours)}\\.") for theirs, ours in names if theirs != ours]
    renamings += [(f"\\.{re.escape(theirs)}", f"\\.{re.escape(ours)}") for theirs, ours in (*LAYER, *MLP[model_type])]
    fused, parts = QKV
    return [
        *(WeightRenaming(theirs, ours) for theirs, ours in renamings),
        *(WeightConverter(f"{fused}.{x}", [f"{part}.{x}" for part in parts], [Split(dim=0)]) for x in ("weight", "bias")),
        *(WeightConverter(theirs, ours, [_Channels(dim)]) for theirs, ours, dim in DYNAMIC),
    ]


def conversions_of(model: PreTrainedModel) -> list[WeightConverter | WeightRenaming]:
    """The conversions whose reverse gives the parameters of `model` their released names."""
    return _conversions(model.config.model_type, "" if model.base_model is model else f"{model.base_model_prefix}.")


def renamed(state_dict: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters of `model` by released name, all or some, by our names. Others keep their names."""
    conversions, ours = conversions_of(model), {}
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    for theirs, tensor in state_dict.items():
        name, pattern = rename_source_key(theirs, renamings, converters)
        if pattern is None:
            ours[name] = tensor
        else:
            converter = next(c for c in converters if pattern in c.source_patterns)
            converter.add_tensor(name, theirs, pattern, tensor)  # type: ignore[arg-type]  # saving hands tensors over too
            ours |= converter.convert(name, model=model, config=model.config)
    return ours


for _model_type in MLP:
    register_checkpoint_conversion_mapping(_model_type, _conversions(_model_type, "model."), overwrite=True)
