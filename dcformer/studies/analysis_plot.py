"""Draws what `dcformer.studies.analyze` measured."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dcformer.studies.plot import save

_COLOURS = {"raw": "#30638e", "mixed": "#edae49", "composed": "#d1495b"}
_LABELS = {"raw": "without composition", "mixed": "scores composed", "composed": "composed"}
_PARTS = {
    "static": ("static", "#7f7f7f"),
    "query": ("query-wise", "#d1495b"),
    "query_gate": ("query's gates", "#e9a3ab"),
    "key": ("key-wise", "#30638e"),
    "key_gate": ("key's gates", "#9dbbd3"),
    "dynamic": ("all dynamic parts", "#1b1b1b"),
}
_COLUMNS = 6  # of layers in a row of heat maps


def plot_analysis(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draws a report as pictures.

    Args:
        report: what `dcformer.studies.analyze.analyze` returns.
        folder: where they go, each as PNG and SVG: `layers`, `similarity`, and `tokens` where heads are mixed by token.

    Returns:
        The files.
    """
    layers = report["layers"]
    paths = save(_by_layer(layers), folder, "layers") + save(_heat_maps(layers), folder, "similarity")
    if any(layer["mixing"] for layer in layers):
        paths += save(_by_token(layers), folder, "tokens")
    return paths


def _by_layer(layers: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 7), layout="constrained")
    similarity, rank, entropy, *shares, beside = figure.subplots(2, 3).flat
    index = [layer["layer"] for layer in layers]
    for kind in ("raw", "composed"):
        means = [layer["similarity"][kind]["mean"] for layer in layers]
        similarity.plot(index, means, ".-", color=_COLOURS[kind], label=_LABELS[kind])
    for axes, name in ((rank, "effective_rank"), (entropy, "entropy")):
        for kind in layers[0][name]:
            axes.plot(index, [fmean(layer[name][kind]) for layer in layers], ".-", color=_COLOURS[kind], label=_LABELS[kind])
            for layer in layers:
                axes.plot([layer["layer"]] * len(layer[name][kind]), layer[name][kind], ".", color=_COLOURS[kind], alpha=0.2)
    similarity.set_title("cosine between heads' attention, mean of pairs")
    rank.set_title("effective rank of the scores, by head and mean")
    entropy.set_title("entropy of the attention in nats, by head and mean")
    for axes, side in zip(shares, ("scores", "weights"), strict=True):
        for part, (label, colour) in _PARTS.items():
            there = [layer for layer in layers if part in (layer["variance"] or {}).get(side, {})]
            if there:
                values = [layer["variance"][side][part] for layer in there]
                axes.plot([layer["layer"] for layer in there], values, ".-", color=colour, label=label)
        axes.set_title(f"variance that a part adds to the {side}, share of all")
    _finish([similarity, rank, entropy])
    _finish(shares, legend=False)
    beside.set_axis_off()
    parts = {label: handle for axes in shares for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if parts:
        beside.legend(parts.values(), parts.keys(), frameon=False, loc="upper left")
    return figure


def _heat_maps(layers: list[dict[str, Any]]) -> Figure:
    """Two rows, without and with composition, for every few layers."""
    columns = min(_COLUMNS, len(layers))
    blocks = -(-len(layers) // columns)
    figure = Figure(figsize=(1.9 * columns + 1.5, 4.2 * blocks), layout="constrained")
    grid = figure.subplots(2 * blocks, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for place, layer in enumerate(layers):
        block, column = divmod(place, columns)
        for row, kind in enumerate(("raw", "composed")):
            axes = grid[2 * block + row, column]
            image = axes.imshow(layer["similarity"][kind]["matrix"], vmin=-1, vmax=1, cmap="RdBu_r")
            axes.set_title(f"layer {layer['layer']}, {_LABELS[kind]}", fontsize=8)
    figure.colorbar(image, ax=grid, label="cosine between heads' attention", shrink=0.6)
    return figure


def _by_token(layers: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(11, 7), layout="constrained")
    for row, side in zip(figure.subplots(2, 3), ("scores", "weights"), strict=True):
        norm, constant, cosine = row
        there = [layer for layer in layers if side in (layer["mixing"] or {})]
        for part in ("query", "key"):
            label, colour = _PARTS[part]
            mixed = [layer for layer in there if part in layer["mixing"][side]]
            if mixed:
                index = [layer["layer"] for layer in mixed]
                figures = [layer["mixing"][side][part] for layer in mixed]
                _band(norm, index, [f["norm"] for f in figures], label, colour)
                constant.plot(index, [f["constant"] for f in figures], ".-", color=colour, label=label)
        both = [layer for layer in there if "cosine" in layer["mixing"][side]]
        if both:
            spreads = [layer["mixing"][side]["cosine"] for layer in both]
            _band(cosine, [layer["layer"] for layer in both], spreads, "query- with key-wise", _PARTS["dynamic"][1])
        norm.set_title(f"norm of a token's mixing of {side}")
        constant.set_title("share of it that all tokens have in common")
        cosine.set_title("cosine between both mixings of a token")
        _finish(list(row))
    return figure


def _band(axes: Axes, index: list[int], spreads: list[dict[str, float]], label: str, colour: str) -> None:
    """The mean, and where nine tenths of the tokens are."""
    axes.plot(index, [s["mean"] for s in spreads], ".-", color=colour, label=label)
    axes.fill_between(index, [s["p5"] for s in spreads], [s["p95"] for s in spreads], color=colour, alpha=0.15, linewidth=0)


def _finish(panels: list[Axes], legend: bool = True) -> None:
    for axes in panels:
        axes.title.set_fontsize(9)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if legend and axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
