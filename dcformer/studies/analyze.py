"""What composition does to the heads of a trained model, measured on real text, layer by layer.

T tokens a row (queries and keys), N heads, S keys.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from dcformer.models.attention import AttentionInputs
from dcformer.ops import Composition
from dcformer.ops.reference import compose
from dcformer.studies.analysis_plot import plot_analysis
from dcformer.studies.heads import attention_inputs, check_has_heads, maps, mixing
from dcformer.studies.provenance import provenance
from dcformer.training import DataSettings, prepare_data
from dcformer.training.files import new_folder, write_json

# Queries with fewer keys are left out of comparisons between heads: with one key all heads are alike.
_FEWEST_KEYS = 8
_TOKENS_LISTED = 8
_LEAST_COUNT = 5  # of a token, to be listed
_TINY = torch.finfo(torch.float32).tiny  # in the place of a zero below a fraction bar


def analyze(
    model: Any, data: DataSettings, out: Path, *, checkpoint: str, rows: int = 16, console: Console | None = None
) -> dict[str, Any]:
    """Measures the heads of every layer on the first rows of the validation text, and writes figures and pictures.

    `out` then holds analysis.json and layers, similarity and, where heads are mixed by token, tokens as PNG and SVG.

    Args:
        model: a DCFormer or DCPythia, composed or plain.
        data: the text; its `tokenizer` is the model's, its `block_size` T. A model that was trained on the same `data` has not
            seen the rows.
        out: folder to write; not there yet, or empty.
        checkpoint: what the report calls the model.
        rows: how many rows.
        console: where progress is shown; None: nowhere.

    Returns:
        What analysis.json holds: `format`, `checkpoint`, `settings`, `data`, `provenance`, `model` and `layers`, for each:

        `similarity`: of the heads' attention, cosine over keys, mean over queries; `raw`, the softmax of unmixed scores, and
        `composed`, each `mean` (of all pairs of heads) and `matrix` [N, N]. `effective_rank` of the score matrices [T, T], the
        exponential of the entropy of the singular values' shares (Roy and Vetterli 2007), by head, `raw` and `composed`.
        `entropy` of the attention in nats, by head: `raw`, `mixed` (the softmax of composed scores), and `composed`, of shares
        of absolute values, as these weights may be negative. `variance`: of `scores` and `weights`, the variance over visible
        keys that each part adds, over that of the sum; parts may correlate, so that shares need not add up. `mixing`, of
        `scores` and `weights`: for the `query`-wise and `key`-wise matrices of all tokens the Frobenius norm (`norm`, mean and
        percentiles), the share of the squared norm that is the same for every token of a row (`constant`), tokens with the
        largest mean norm (`tokens`), and the `cosine` between both matrices of a token. `variance` and `mixing` are `None` in
        plain models.

    Raises:
        ValueError: the model is of another kind, `rows` or a setting is out of range, or `out` holds something.
        OSError: something could not be written.
    """
    check_has_heads(model)
    if rows < 1:
        raise ValueError(f"rows={rows} must be at least 1")
    if data.block_size < 2 * _FEWEST_KEYS:
        raise ValueError(f"block_size={data.block_size} must be at least {2 * _FEWEST_KEYS} to compare heads")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r} is there already; a new or empty folder would do")
    prepared = prepare_data(data)
    taken = prepared.validation.select(range(min(rows, len(prepared.validation)))).with_format("torch")
    measured: list[list[dict[str, Tensor]]] = [[] for _ in range(model.config.num_hidden_layers)]
    hidden = console is None or not console.is_terminal
    for row in track(taken, "rows", console=console, disable=hidden):
        ids = row["input_ids"][None].to(model.device)
        for layer, inputs in zip(measured, attention_inputs(model, ids), strict=True):
            layer.append(_measure(inputs))
    names = prepared.tokenizer.batch_decode(torch.arange(len(prepared.tokenizer))[:, None])
    ids = torch.stack([row["input_ids"] for row in taken])
    report = {
        "format": 1,
        "checkpoint": checkpoint,
        "settings": {"data": asdict(data) | {"data": list(data.data), "tokenizer": checkpoint}, "rows": len(taken)},
        "data": {name: value for name, value in prepared.summary.items() if name != "cached"},
        "provenance": provenance(),
        "model": {"parameters": model.num_parameters(), "config": model.config.to_diff_dict()},
        "layers": [
            {"layer": index, "window": model.config.sliding_window if kind == "sliding_attention" else None}
            | _summarize(measured[index], ids, names)
            for index, kind in enumerate(model.config.layer_types)
        ],
    }
    with new_folder(out, "the analysis") as folder:
        write_json(folder / "analysis.json", report)
        plot_analysis(report, folder)
    return report


@torch.inference_mode()
def _measure(inputs: AttentionInputs) -> dict[str, Tensor]:
    """The figures of one row in one layer, by names that say where they go in the report."""
    found = maps(inputs)
    seen = found.visible.sum(-1)[0, 0]  # [T]
    enough = seen >= min(_FEWEST_KEYS, int(seen.max()))
    figures = {}
    for name, attention in (("raw", found.raw), ("composed", found.composed)):
        figures[f"similarity/{name}"] = _similarity(attention[0, :, enough])
    for name, scores in (("raw", found.scores), ("composed", found.composed_scores)):
        figures[f"effective_rank/{name}"] = _effective_rank(scores[0])
    for name, attention in (("raw", found.raw), ("mixed", found.mixed), ("composed", found.composed)):
        figures[f"entropy/{name}"] = _entropy(attention[0].abs())[:, enough].mean(-1)
    for side, x, composition in (("scores", found.scores, inputs.pre), ("weights", found.mixed, inputs.post)):
        if composition.is_identity:
            continue
        whole = _variance(compose(x, composition), found.visible)
        for part, alone in _parts(composition).items():
            share = _variance(compose(x, alone) - x, found.visible) / whole.clamp_min(_TINY)
            figures[f"variance/{side}/{part}"] = share
        figures |= {f"mixing/{side}/{name}": value for name, value in _by_token(composition, x).items()}
    return {name: value.cpu() for name, value in figures.items()}


def _similarity(attention: Tensor) -> Tensor:
    """Of heads [N, T, S]: cosine over keys, mean over queries, [N, N]."""
    direction = torch.nn.functional.normalize(attention, dim=-1)
    return torch.einsum("nts,mts->nm", direction, direction) / attention.shape[1]


def _effective_rank(matrices: Tensor) -> Tensor:
    """[N, T, S] to [N]."""
    return _entropy(torch.linalg.svdvals(matrices)).exp()


def _entropy(amounts: Tensor) -> Tensor:
    """In nats, of the shares that amounts have of their sum over the last dimension."""
    return torch.special.entr(amounts / amounts.sum(-1, keepdim=True).clamp_min(_TINY)).sum(-1)


def _variance(x: Tensor, visible: Tensor) -> Tensor:
    """Of x [B, N, T, S] over the visible keys of each query and head: a shift of a whole row of scores would change nothing."""
    mean = (x * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
    return ((x - mean) * visible).square().mean()


def _parts(composition: Composition) -> dict[str, Composition]:
    """The terms of its equation one by one, and all that depend on tokens together."""
    parts = {"dynamic": composition._replace(base=None)}
    if composition.base is not None:
        parts["static"] = composition._replace(query=None, key=None)
    nothing = composition._replace(base=None, query=None, key=None)
    for name in ("query", "key"):
        weights = getattr(composition, name)
        if weights is not None:
            ranks, gate = weights.clone(), weights.clone()
            ranks[:, :, -1], gate[:, :, :-1] = 0, 0
            parts |= {name: nothing._replace(**{name: ranks}), f"{name}_gate": nothing._replace(**{name: gate})}
    return parts


def _by_token(composition: Composition, x: Tensor) -> dict[str, Tensor]:
    """How query- and key-wise matrices differ from token to token, for a row of T tokens."""
    matrices = mixing(composition, x.shape[0], x.shape[2], x.shape[1])
    both = {name: getattr(matrices, name)[0].flatten(1) for name in ("query", "key") if getattr(composition, name) is not None}
    figures = {}
    for name, vectors in both.items():  # [T, N N]
        figures[f"{name}/norm"] = vectors.norm(dim=1)
        figures[f"{name}/constant"] = vectors.mean(0).square().sum() / vectors.square().sum(1).mean().clamp_min(_TINY)
    if len(both) == 2:
        figures["cosine"] = torch.cosine_similarity(both["query"], both["key"], dim=1)
    return figures


def _summarize(rows: list[dict[str, Tensor]], ids: Tensor, names: list[str]) -> dict[str, Any]:
    """What the report says of a layer.

    Args:
        rows: of `_measure`.
        ids: [rows, T], their tokens.
        names: of all tokens of the vocabulary.
    """
    all_rows = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    mean = {name: values.mean(0) for name, values in all_rows.items()}
    report: dict[str, Any] = {"similarity": {}}
    for name in ("raw", "composed"):
        matrix = mean[f"similarity/{name}"]
        others = matrix[~torch.eye(len(matrix), dtype=torch.bool)]
        report["similarity"][name] = {"mean": others.mean().item() if len(others) else None, "matrix": matrix.tolist()}
    for figure, kinds in (("effective_rank", ("raw", "composed")), ("entropy", ("raw", "mixed", "composed"))):
        report[figure] = {name: mean[f"{figure}/{name}"].tolist() for name in kinds}
    variance: dict[str, dict[str, float]] = defaultdict(dict)
    per_token: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, values in all_rows.items():
        figure, side, *rest = name.split("/")
        if figure == "variance":
            variance[side][rest[0]] = mean[name].item()
        elif figure == "mixing" and rest[-1] == "norm":
            spread = _spread(values) | {"tokens": _strongest(values, ids, names)}
            per_token[side][rest[0]] = {"norm": spread, "constant": mean[name.replace("norm", "constant")].item()}
        elif figure == "mixing" and rest[-1] == "cosine":
            per_token[side]["cosine"] = _spread(values)
    return report | {"variance": dict(variance) or None, "mixing": dict(per_token) or None}


def _spread(values: Tensor) -> dict[str, float]:
    """Mean and percentiles of all values."""
    low, median, high = values.flatten().quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return {"mean": values.mean().item(), "p5": low, "median": median, "p95": high}


def _strongest(norms: Tensor, ids: Tensor, names: list[str]) -> list[dict[str, Any]]:
    """Tokens that are there often enough, those with the largest mean norm first."""
    tokens, place, counts = ids.unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(tokens)).index_add_(0, place.flatten(), norms.flatten()) / counts
    means[counts < _LEAST_COUNT] = -1
    order = means.argsort(descending=True)[:_TOKENS_LISTED].tolist()
    return [{"token": names[tokens[i]], "norm": means[i].item(), "count": counts[i].item()} for i in order if means[i] >= 0]


def table(report: dict[str, Any]) -> Table:
    """The means of each layer, without -> with composition."""
    titles = ("layer", "similarity of heads", "effective rank", "entropy", "dynamic share of scores", "of weights")
    shown = Table(*titles, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in shown.columns:
        column.justify = "right"
    for layer in report["layers"]:
        alike, variance = layer["similarity"], layer["variance"] or {}
        cells = [str(layer["layer"]), _change(*(alike[kind]["mean"] for kind in ("raw", "composed")))]
        cells += [
            _change(*(fmean(layer[name][kind]) for kind in ("raw", "composed"))) for name in ("effective_rank", "entropy")
        ]
        cells += [f"{variance[side]['dynamic']:.1%}" if side in variance else "" for side in ("scores", "weights")]
        shown.add_row(*cells)
    return shown


def _change(before: float | None, after: float | None) -> str:
    return "" if before is None or after is None else f"{before:.3f} -> {after:.3f}"
