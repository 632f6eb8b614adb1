"""Random inputs and the error budget, shared by tests and benchmarks.

B batch, T queries, S keys, N heads, K key/value heads, D head dim, R rank, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcformer.ops import Composition, composed_attention


@dataclass
class Inputs:
    """The tensors of one call of `composed_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    pre: Composition | None
    post: Composition | None
    attn_mask: Tensor | None = None

    def call(self) -> tuple:
        """The positional arguments."""
        return self.query, self.key, self.value, self.pre, self.post

    def floats(self) -> list[Tensor]:
        """Every floating-point tensor, in a fixed order."""
        parts = [self.query, self.key, self.value, *(self.pre or ())[:3], *(self.post or ())[:3], self.attn_mask]
        return [part for part in parts if part is not None and part.is_floating_point()]

    def to(self, dtype: torch.dtype) -> Inputs:
        """A detached copy in another dtype, requiring gradients."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.detach().to(dtype, copy=True).requires_grad_()

        pre, post = (None if c is None else c.map(cast) for c in (self.pre, self.post))
        mask = self.attn_mask
        if mask is not None and mask.is_floating_point():
            mask = cast(mask)
        return Inputs(cast(self.query), cast(self.key), cast(self.value), pre, post, mask)


def make_inputs(
    B: int = 1,
    N: int = 4,
    T: int = 33,
    D: int = 16,
    *,
    S: int | None = None,
    K: int | None = None,
    R: int = 2,
    G: int = 1,
    parts: str = "bqk",
    sides: str = "pre post",
    mask: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Random inputs whose composition changes the result by about as much as the attention itself.

    Args:
        parts: which of base (b), query-wise (q) and key-wise (k) mixing there is.
        sides: which of "pre" and "post" there are.
        mask: "bool", "bool padding" ([B,1,1,S]), "float", "float heads" ([1,N,T,S]) or `None`.
    """
    S, K = T if S is None else S, N if K is None else K

    def draw(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64, device=device) * std).to(dtype).requires_grad_()

    def composition(side: str) -> Composition | None:
        if side not in sides.split():
            return None
        n = N // G
        return Composition(
            draw(G, n, n, std=0.5 / n**0.5) if "b" in parts else None,
            draw(B, T, 2 * R + 1, N, std=0.6 / n**0.25) if "q" in parts else None,
            draw(B, S, 2 * R + 1, N, std=0.6 / n**0.25) if "k" in parts else None,
            G,
        )

    masks = {
        None: lambda: None,
        "bool": lambda: torch.rand(T, S, device=device) > 0.3,
        "bool padding": lambda: torch.rand(B, 1, 1, S, device=device) > 0.3,
        "float": lambda: draw(T, S),
        "float heads": lambda: draw(1, N, T, S),
    }
    q, k, v = draw(B, N, T, D), draw(B, K, S, D), draw(B, K, S, D)
    return Inputs(q, k, v, composition("pre"), composition("post"), masks[mask]())


def assert_within_budget(
    actual: Tensor, eager: Tensor, exact: Tensor, factor: float, what: str = "output", terms: float = 0.0
) -> None:
    """Checks that `actual` is at most `factor` times as far from `exact` as `eager` is in the mean square.

    The largest error may be twice that: it hangs on one element, and by luck the eager error may be small just there. One
    rounding of the result to its own dtype is granted on top.

    What is exactly zero, as the gradient of a query with one key, is a difference of equal terms. Each may come from a few
    roundings, and by luck the eager ones are the same: there, four times `factor` roundings of a term are granted.

    Args:
        actual: what is tested.
        eager: the reference in the same dtype.
        exact: the reference in float64.
        factor: 2 forward, 3 backward.
        what: a name for the message.
        terms: how large the terms are where `exact` is zero.

    Raises:
        AssertionError: with the errors; also when anything is NaN or infinite.
    """
    assert actual.shape == exact.shape, f"{what} has shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    assert bool(actual.isfinite().all()), f"{what} is not finite"
    if exact.numel() == 0:
        return
    rounding = torch.finfo(actual.dtype).eps
    error, eager_error = ((t.detach().double() - exact.detach()).abs() for t in (actual, eager))
    for name, measure, times in (("mean square", lambda e: e.square().mean().sqrt(), 1), ("largest", torch.max, 2)):
        got, size, reference = (float(measure(e)) for e in (error, exact.detach().abs(), eager_error))
        allowed = times * factor * reference + rounding * (size or 4 * factor * terms)
        assert got <= allowed, f"{what}: {name} error {got:.3g} exceeds {allowed:.3g} (eager {reference:.3g})"


def results(inputs: Inputs, grad: Tensor | None, **options: Any) -> list[Tensor]:
    """The output of `composed_attention`, and the gradients of all of `inputs.floats()` where that of the output is `grad`."""
    out = composed_attention(*inputs.call(), attn_mask=inputs.attn_mask, **options)
    return [out] if grad is None else [out, *torch.autograd.grad(out, inputs.floats(), grad.to(out.dtype))]


def check_backend(
    draw: Callable[[], Inputs], backend: str, *, draws: int | None = None, gradients: bool = True, **options: Any
) -> None:
    """Checks output and all gradients of a backend against the reference in float64.

    Errors of all draws are pooled, each relative to its largest value.

    Args:
        draw: gives fresh inputs of the case.
        backend: what is tested.
        draws: how many; None: five of a small case, one of a large one.
        gradients: whether to check them too.
        options: of `composed_attention`.

    Raises:
        AssertionError: as `assert_within_budget`.
    """
    pooled: list[list[tuple[Tensor, ...]]] = []
    while True:
        inputs = draw()
        grad = torch.randn(inputs.query.shape, device=inputs.query.device) if gradients else None
        exact = results(inputs.to(torch.float64), grad, backend="reference", **options)
        eager = results(inputs, grad, backend="reference", **options)
        actual = results(inputs, grad, backend=backend, **options)
        sizes = [float(e.detach().abs().max()) if e.numel() else 0.0 for e in exact]
        scales = [size or max(*sizes, 1e-30) for size in sizes]
        pooled.append(
            [tuple(t.detach() / s for t in (a, r, e)) for a, r, e, s in zip(actual, eager, exact, scales, strict=True)]
        )
        if len(pooled) >= (draws or (5 if inputs.query.shape[2] < 1000 else 1)):
            break
    for i, tensors in enumerate(zip(*pooled, strict=True)):
        actual_all, eager_all, exact_all = (torch.stack(parts) for parts in zip(*tensors, strict=True))
        what = "output" if i == 0 else f"gradient {i - 1}"
        assert_within_budget(actual_all, eager_all, exact_all, factor=2 if i == 0 else 3, what=what, terms=1)
