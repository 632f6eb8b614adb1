"""Loss against cost of two models on the same text, and how much cost one saves the other.

log(loss) is taken as a parabola in log(cost). What bends it is one for both models: upwards where losses near the floor that no
model can go below, downwards where models of few steps have yet to learn what is easy. Height and slope are each model's own.
d draws of a bootstrap, n points of a model.
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
class Curves:
    """What was fitted, for every draw: log(loss) = height + slope * x + bend * x ** 2, with x = log(cost).

    Attributes:
        lines: for each model, height and slope [d].
        bend: [d].
    """

    lines: dict[str, tuple[Array, Array]]
    bend: Array

    def loss(self, model: str, cost: Array) -> Array:
        """[d, n] of costs [n]."""
        height, slope = self.lines[model]
        x = np.log(cost)
        return np.exp(height[:, None] + slope[:, None] * x + self.bend[:, None] * x**2)

    def cost(self, model: str, loss: Array) -> Array:
        """[d, n], the cost at which a model has a loss [d, n], where its curve falls.

        Infinite where the whole curve is above the loss, 0 where the whole curve is below it.
        """
        height, slope, bend = (each[:, None] for each in (*self.lines[model], self.bend))
        drop = height - np.log(loss)
        root = slope**2 - 4 * bend * drop
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x = 2 * drop / (np.sqrt(root) - slope)  # in this form bend may be 0
            found = np.where(np.isfinite(x), np.exp(x), np.inf)
        return np.where((root < 0) & (bend < 0), 0.0, found)


def multipliers(points: Points, ours: str, theirs: str, at: Array, seed: int = 0) -> dict[str, Any]:
    """How many times a cost of ours the other model needs for the loss that we have there, both read off the curves.

    Intervals come from a bootstrap: residuals of all points together, widened by the degrees of freedom that the fit took, are
    drawn anew, added to the curves, and all is fitted again. Their size is drawn too, as few points tell little of it: that of
    normal residuals (a chi-square). Costs beyond the other model's least or largest are extrapolated.

    Args:
        points: for both models the costs [n] and the losses [n] of finished runs.
        ours: a key of `points`.
        theirs: the other one.
        at: our costs to look at, ascending, one a size; at least 3 for curves that bend.
        seed: of the bootstrap.

    Returns:
        JSON-ready. `curves`: of each model log(loss) as a polynomial in log(cost), constant first; `at`: for each cost `cost`,
        `loss`, `multiplier`, `low` and `high` (95 %), `extrapolated`. `None`: there is no such number, as `low` and `high`
        where there are no more points than the fit has parameters, or they are beyond all bounds. All is empty for less than
        two sizes.
    """
    if len(at) < 2:
        return {"curves": {}, "at": []}
    bent = len(at) > 2
    curves = _fit({model: (cost, loss[None]) for model, (cost, loss) in points.items()}, bent)
    found = _multipliers(curves, at, ours, theirs)[0]
    count = sum(len(cost) for cost, _ in points.values())
    freedom = count - 4 - bent
    low = high = np.full(len(at), np.nan)
    if freedom > 0:
        draws = _multipliers(_fit(_redrawn(points, curves, freedom, seed), bent), at, ours, theirs)
        margin = (1 - _LEVEL) / 2
        low, high = np.quantile(draws, [margin, 1 - margin], axis=0, method="nearest")
    return {
        "curves": {
            model: [float(height[0]), float(slope[0]), float(curves.bend[0])] for model, (height, slope) in curves.lines.items()
        },
        "at": [
            {
                "cost": float(cost),
                "loss": float(curves.loss(ours, at)[0, i]),
                "multiplier": _finite(found[i]),
                "low": _finite(low[i]),
                "high": _finite(high[i]),
                "extrapolated": not points[theirs][0].min() <= found[i] * cost <= points[theirs][0].max(),
            }
            for i, cost in enumerate(at)
        ],
    }


def _multipliers(curves: Curves, costs: Array, ours: str, theirs: str) -> Array:
    return curves.cost(theirs, curves.loss(ours, costs)) / costs


def _redrawn(points: Points, curves: Curves, freedom: int, seed: int) -> Points:
    expected = {model: curves.loss(model, cost)[0] for model, (cost, _) in points.items()}
    residuals = np.concatenate([np.log(loss / expected[model]) for model, (_, loss) in points.items()])
    residuals = (residuals - residuals.mean()) * np.sqrt(len(residuals) / freedom)
    draw = np.random.default_rng(seed)
    size = np.sqrt(freedom / draw.chisquare(freedom, (_DRAWS, 1)))
    return {
        model: (cost, expected[model] * np.exp(size * draw.choice(residuals, (_DRAWS, len(cost)))))
        for model, (cost, _) in points.items()
    }


def _fit(points: Points, bent: bool) -> Curves:
    """Least squares of log losses; losses are [d, n]."""
    rows = []
    for i, (cost, _) in enumerate(points.values()):
        row = np.zeros((len(cost), 2 * len(points) + 1))
        row[:, 2 * i], row[:, 2 * i + 1], row[:, -1] = 1, np.log(cost), bent * np.log(cost) ** 2
        rows.append(row)
    losses = np.concatenate([loss for _, loss in points.values()], axis=1)
    solved = np.linalg.lstsq(np.concatenate(rows), np.log(losses).T, rcond=None)[0]  # [parameters, d]
    return Curves({model: (solved[2 * i], solved[2 * i + 1]) for i, model in enumerate(points)}, solved[-1])


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
