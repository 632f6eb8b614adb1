"""Scaling laws of two models on the same text: loss = floor + scale * cost ** -exponent, and how much cost one saves the other.

The floor, what no model can know of the text, is one for both; scale and exponent are each model's own. d draws of a bootstrap,
n points of a model, f floors tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Points = dict[str, tuple[Array, Array]]

_DRAWS, _LEVEL = 1000, 0.95


@dataclass(frozen=True)
class Laws:
    """What was fitted, for every draw.

    Attributes:
        floor: [d].
        lines: for each model, intercept and slope [d] of log(loss - floor) against log(cost).
    """

    floor: Array
    lines: dict[str, tuple[Array, Array]]

    def loss(self, model: str, cost: Array) -> Array:
        """[d, n] of costs [n]."""
        intercept, slope = self.lines[model]
        return self.floor[:, None] + np.exp(intercept[:, None] + slope[:, None] * np.log(cost))

    def cost(self, model: str, loss: Array) -> Array:
        """[d, n], the cost at which a model has a loss [d, n]; infinite where it never has."""
        intercept, slope = self.lines[model]
        above = loss - self.floor[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            log_cost = (np.log(above) - intercept[:, None]) / slope[:, None]
        return np.where((above > 0) & (slope[:, None] < 0), np.exp(np.minimum(log_cost, 700)), np.inf)


def multipliers(points: Points, ours: str, theirs: str, at: Array, seed: int = 0) -> dict[str, Any]:
    """How many times a cost of ours the other model needs for the loss that we have there, both read off the laws.

    Intervals come from a bootstrap: residuals of all points together, widened by the degrees of freedom that the fit took, are
    drawn anew, added to the laws, and all is fitted again. Costs beyond the other model's largest are extrapolated.

    Args:
        points: for both models the costs [n] and the losses [n] of finished runs.
        ours: a key of `points`.
        theirs: the other one.
        at: our costs to look at, ascending, one a size; at least 3 for a floor above zero.
        seed: of the bootstrap.

    Returns:
        JSON-ready. `floor`; `laws`: of each model `scale` and `exponent`; `at`: for each cost `cost`,
        `loss`, `multiplier`, `low` and `high` (95 %), `extrapolated`. `None`: there is no such number, as `low` and `high`
        where there are no more points than the fit has parameters, or they are beyond all bounds. All is `None` or empty for
        less than two sizes.
    """
    if len(at) < 2:
        return {"floor": None, "laws": {}, "at": []}
    with_floor = len(at) > 2
    laws = _fit({model: (cost, loss[None]) for model, (cost, loss) in points.items()}, with_floor)
    found = _multipliers(laws, at, ours, theirs)[0]
    count = sum(len(cost) for cost, _ in points.values())
    freedom = count - 4 - with_floor
    low = high = np.full(len(at), np.nan)
    if freedom > 0:
        draws = _multipliers(_fit(_redrawn(points, laws, count / freedom, seed), with_floor), at, ours, theirs)
        margin = (1 - _LEVEL) / 2
        low, high = np.quantile(draws, [margin, 1 - margin], axis=0, method="nearest")
    return {
        "floor": float(laws.floor[0]),
        "laws": {
            model: {"scale": float(np.exp(intercept[0])), "exponent": float(-slope[0])}
            for model, (intercept, slope) in laws.lines.items()
        },
        "at": [
            {
                "cost": float(cost),
                "loss": float(laws.loss(ours, at)[0, i]),
                "multiplier": _finite(found[i]),
                "low": _finite(low[i]),
                "high": _finite(high[i]),
                "extrapolated": bool(not found[i] * cost <= points[theirs][0].max()),
            }
            for i, cost in enumerate(at)
        ],
    }


def _multipliers(laws: Laws, costs: Array, ours: str, theirs: str) -> Array:
    return laws.cost(theirs, laws.loss(ours, costs)) / costs


def _redrawn(points: Points, laws: Laws, inflation: float, seed: int) -> Points:
    expected = {model: laws.loss(model, cost)[0] for model, (cost, _) in points.items()}
    residuals = np.concatenate([np.log(loss / expected[model]) for model, (_, loss) in points.items()])
    residuals = (residuals - residuals.mean()) * np.sqrt(inflation)
    draw = np.random.default_rng(seed)
    return {
        model: (cost, expected[model] * np.exp(draw.choice(residuals, (_DRAWS, len(cost)))))
        for model, (cost, _) in points.items()
    }


def _fit(points: Points, with_floor: bool) -> Laws:
    """Least squares of log losses; losses are [d, n]. Floors are tried on a grid, then on a finer one around the best."""
    top = np.min([loss.min(axis=1) for _, loss in points.values()], axis=0)  # [d]
    shares = np.zeros((len(top), 1))
    for step in (1 / 32, 1 / 512, 1 / 8192) if with_floor else ():
        offsets = (np.arange(32) if step == 1 / 32 else np.arange(-16, 17)) * step
        best = _errors(points, top[:, None] * np.clip(shares + offsets, 0, 1 - 1e-4))[0]
        shares = np.clip(shares[:, 0] + offsets[best], 0, 1 - 1e-4)[:, None]
    floors = top[:, None] * shares
    lines = _errors(points, floors)[1]
    return Laws(floors[:, 0], {model: (intercept[:, 0], slope[:, 0]) for model, (intercept, slope) in lines.items()})


def _errors(points: Points, floors: Array) -> tuple[NDArray[np.intp], dict[str, tuple[Array, Array]]]:
    """For floors [d, f]: which is best [d], and intercept and slope [d, f] of each model's line."""
    errors, lines = np.zeros_like(floors), {}
    for model, (cost, loss) in points.items():
        x = np.log(cost)
        y = np.log(loss[:, None] - floors[:, :, None])  # [d, f, n]
        slope = ((y - y.mean(2, keepdims=True)) * (x - x.mean())).sum(2) / ((x - x.mean()) ** 2).sum()
        intercept = y.mean(2) - slope * x.mean()
        fitted = floors[:, :, None] + np.exp(intercept[:, :, None] + slope[:, :, None] * x)
        errors += ((np.log(loss)[:, None] - np.log(fitted)) ** 2).sum(2)
        lines[model] = (intercept, slope)
    return errors.argmin(1), lines


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
