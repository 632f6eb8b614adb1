"""Draws what studies found: a comparison's curves, a ladder of sizes, an ablation, accuracies by task."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from dcformer.studies.report import NAMES

_COLOURS = {"dcformer": "#d1495b", "transformer": "#30638e"}
_SKIP = 0.15  # share of the training, at the beginning, that may leave the picture at the top: its fall would flatten the rest


def plot_curves(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draws validation loss against tokens and against training FLOPs, every seed a line.

    Args:
        report: what `dcformer.studies.compare.compare` returns.
        folder: where curves.png and curves.svg go.

    Returns:
        The two files.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_tokens, by_flops = figure.subplots(1, 2, sharey=True)
    for axes, unit in ((by_tokens, "tokens"), (by_flops, "FLOPs")):
        for model in NAMES:
            _draw(axes, report, model, report["models"][model]["flops_per_token"] if unit == "FLOPs" else 1)
        axes.set_xlabel(f"training {unit}")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_tokens.set_ylabel("validation loss (nats per token)")
    by_tokens.legend(frameon=False)
    _crop(by_tokens, report)
    return save(figure, folder, "curves")


def plot_synthetic(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the accuracy of each family of tasks, both models, mean over seeds.

    Args:
        report: what `dcformer.studies.synthetic.synthetic` returns.
        folder: where synthetic.png and synthetic.svg go.

    Returns:
        The two files.
    """
    families = list(
        report["accuracy"]["seen"]["dcformer"]["families"] or report["accuracy"]["seen"]["transformer"]["families"]
    )[::-1]
    figure = Figure(figsize=(11, 1.5 + 0.24 * len(families)), layout="constrained")
    for axes, (split, models) in zip(figure.subplots(1, 2, sharey=True), report["accuracy"].items(), strict=True):
        for model, found in models.items():
            if found["families"]:
                shares = [found["families"][family] for family in families]
                axes.plot(
                    shares, range(len(families)), "o", color=_COLOURS[model], label=f"{NAMES[model]}, mean {found['mean']:.1%}"
                )
        axes.set_title(f"{split} words")
        axes.set_xlabel("accuracy of the words in brackets")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-1, len(families))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.03))
    figure.axes[0].set_yticks(range(len(families)), families)
    return save(figure, folder, "synthetic")


def plot_scaling(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draws loss against training FLOPs and against training time, both models' runs and the curves fitted to them.

    Args:
        report: what `dcformer.studies.scaling.scaling` returns.
        folder: where scaling.png and scaling.svg go.

    Returns:
        The two files.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, cost, label in zip(panels, ("flops", "seconds"), ("training FLOPs", "training time in seconds"), strict=True):
        for model in NAMES:
            _draw_fit(axes, report, model, cost)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("validation loss (nats per token)")
    panels[0].legend(frameon=False)
    return save(figure, folder, "scaling")


def plot_ablation(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draws the losses of all rows, best on top, every seed a dot.

    Args:
        report: what `dcformer.studies.ablation.ablation` returns.
        folder: where ablation.png and ablation.svg go.

    Returns:
        The two files.
    """
    rows = report["rows"][::-1]
    figure = Figure(figsize=(8, 1 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        losses = [run["loss"] for run in report["runs"] if run["row"] == row["row"] and run["error"] is None]
        plain = report["models"][row["row"]]["config"].get("compose", {}) is None
        axes.plot(losses, [place] * len(losses), "o", color=_COLOURS["transformer" if plain else "dcformer"])
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows])
    axes.set_xlabel("validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return save(figure, folder, "ablation")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each complete or not at all."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        part = path.with_name(path.name + ".part")
        try:
            figure.savefig(part, format=path.suffix[1:], dpi=150)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return paths


def _draw_fit(axes: Axes, report: dict[str, Any], model: str, cost: str) -> None:
    """Points of the runs at the chosen rates; the curve fitted to them, where there is one."""
    rates = report["rates"][model]
    runs = [run for run in report["runs"] if run["model"] == model and run["error"] is None]
    runs = [run for run in runs if rates.get(run["rung"]) == run["learning_rate"]]
    costs = [run[cost] for run in runs]
    axes.plot(costs, [run["loss"] for run in runs], "o", color=_COLOURS[model], label=NAMES[model])
    curve = report[cost]["curves"].get(model)
    if curve:
        x = np.geomspace(min(costs), max(costs))
        axes.plot(x, np.exp(np.polyval(curve[::-1], np.log(x))), color=_COLOURS[model], linewidth=1.2)


def _draw(axes: Axes, report: dict[str, Any], model: str, per_token: float) -> None:
    label = f"{NAMES[model]}, {report['models'][model]['parameters'] / 1e6:.2f} M parameters"
    final = report["final_loss"][model]["mean"]
    if final is not None:
        label += f", ends at {final:.3f}"
    for run in report["runs"]:
        if run["model"] == model:
            x = [e["tokens"] * per_token for e in run["evaluations"]]
            y = [e["loss"] for e in run["evaluations"]]
            axes.plot(x, y, color=_COLOURS[model], linewidth=1.5, marker=".", markersize=5, label=label)
            label = "_"  # later seeds stay out of the legend


def _crop(axes: Axes, report: dict[str, Any]) -> None:
    curves = [run["evaluations"] for run in report["runs"] if run["error"] is None]
    late = [e["loss"] for curve in curves for e in curve if e["step"] >= _SKIP * curve[-1]["step"]]
    if late:
        margin = 0.05 * (max(late) - min(late)) or 0.1
        axes.set_ylim(min(late) - margin, max(late) + margin)
