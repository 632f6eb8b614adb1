"""The `cpu` backend: composed attention as a C++ kernel, compiled at first use.

B batch, T queries, S keys, N heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcformer.ops.composition import Composition
from dcformer.ops.mixers import Call, within_documents
from dcformer.ops.mixers.cpu import operators


class CpuMixer:
    """See `dcformer.ops.mixers.Mixer`."""

    name = "cpu"
    priority = 10

    def refuses(self, call: Call) -> str | None:
        """Why not: the tensors are elsewhere, in another dtype, or the kernel cannot be built here."""
        if call.query.device.type != "cpu":
            return f"it runs on the CPU and query is on {call.query.device}"
        if call.query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"it takes float32, bfloat16 and float16, and query is {call.query.dtype}"
        failure = operators.why_not()
        return None if failure is None else f"the kernel could not be built: {failure}"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """See `Mixer.forward`."""
        tensors, settings = _arguments(call)
        return torch.ops.dcformer_cpu.forward(*tensors, *settings)

    def backward(self, call: Call, grad_out: Tensor, statistics: Tensor, mask_needs_grad: bool) -> list[Tensor]:
        """See `Mixer.backward`."""
        tensors, settings = _arguments(call)
        grads = torch.ops.dcformer_cpu.backward(grad_out, *tensors, statistics, mask_needs_grad, *settings)
        if mask_needs_grad and call.attn_mask is not None:
            grads[-1] = grads[-1].sum_to_size(call.attn_mask.shape)
        return list(grads)


def _arguments(call: Call) -> tuple[tuple[Tensor | None, ...], tuple[object, ...]]:
    """The tensors of a call and the rest, as the operators take them."""
    pre, post = call.pre or Composition(), call.post or Composition()
    mask = call.attn_mask
    if call.documents is not None:
        mask = within_documents(mask, call.documents[:, call.key.shape[2] - call.query.shape[2] :], call.documents)
    tensors = (call.query, call.key, call.value, *pre[:3], *post[:3], mask, call.seed)
    return tensors, (pre.groups, post.groups, call.is_causal, call.window, call.scale, call.dropout_p)
