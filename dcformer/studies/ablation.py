"""One model with parts left out or changed, and two rivals, all on the same budget: which parts of composition matter?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.plot import plot_ablation
from dcformer.studies.provenance import provenance
from dcformer.studies.report import Run, spread
from dcformer.studies.rivals import DifferentialConfig, GatedConfig
from dcformer.studies.runs import Runs, describe
from dcformer.studies.times import step_times
from dcformer.training import DataSettings, prepare_data, with_vocabulary
from dcformer.training.files import explained_disk_errors, write_json, write_text

# 8 layers, so that all window patterns differ; 8 heads, so that two groups have heads to mix.
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
    "initializer_range": 0.073,
}
_STATIC = {"rank": 0, "gates": False, "static": True}
# What changes, and of which model. "DCFormer" is rank 2, one group, query- and key-wise, before and after the softmax, global.
ROWS: dict[str, tuple[type[DCFormerConfig], dict[str, Any]]] = {
    "Transformer++": (DCFormerConfig, {"compose": None}),
    "static only (talking heads)": (DCFormerConfig, {"compose": _STATIC}),
    "DCFormer": (DCFormerConfig, {}),
    "query-wise only": (DCFormerConfig, {"compose": {"key_wise": False}}),
    "key-wise only": (DCFormerConfig, {"compose": {"query_wise": False}}),
    "without gates": (DCFormerConfig, {"compose": {"gates": False}}),
    "pre only": (DCFormerConfig, {"compose": {"post": False}}),
    "post only": (DCFormerConfig, {"compose": {"pre": False}}),
    "rank 1": (DCFormerConfig, {"compose": {"rank": 1}}),
    "rank 4": (DCFormerConfig, {"compose": {"rank": 4}}),
    "2 groups": (DCFormerConfig, {"compose": {"groups": 2}}),
    "windows LG": (DCFormerConfig, {"window_pattern": "LG"}),
    "windows LGLL": (DCFormerConfig, {"window_pattern": "LGLL"}),
    "windows LGL6": (DCFormerConfig, {"window_pattern": "LGL6"}),
    "Transformer++, windows LGLL": (DCFormerConfig, {"compose": None, "window_pattern": "LGLL"}),
    "gated attention, a gate a head": (GatedConfig, {}),
    "gated attention, a gate a channel": (GatedConfig, {"gate_channels": True}),
    "differential attention": (DifferentialConfig, {}),
}


@dataclass(frozen=True)
class Ablation:
    """What to train.

    Attributes:
        rows: of each row its configuration's class and arguments, those of `model` besides.
        model: arguments that all rows share.
        tokens: to train each on.
        seeds: how many.
        train: further arguments of `TrainSettings`, for all rows.
    """

    rows: dict[str, tuple[type[DCFormerConfig], dict[str, Any]]] = field(default_factory=lambda: dict(ROWS))
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    tokens: int = 8_000_000
    seeds: int = 1
    train: dict[str, Any] = field(
        default_factory=lambda: {
            "batch_size": 16,
            "learning_rate": 4e-3,
            "composition_learning_rate_ratio": 0.3,
            "eval_rows": 512,
        }
    )


def ablation(
    data: DataSettings, settings: Ablation, out: Path, work: Path, *, console: Console | None = None
) -> dict[str, Any]:
    """Trains all rows, or goes on where it was; writes the summary after each run.

    All rows have the same data, order of data, number of tokens and settings, the learning rate included. Local layers see an
    eighth of the row. A run that is done is not done again, wherever it was done.

    Steps of all rows are timed first (see `dcformer.studies.times`).

    `out` then holds summary.json, ablation.png, ablation.svg, paragraph.md, times.json and runs/ with a small record of each
    run.

    Args:
        data: what to train on.
        settings: which rows, and how.
        out: folder for the results.
        work: folder for checkpoints and models.
        console: where progress is shown; None: nowhere.

    Returns:
        What summary.json holds: `format`, `study`, `complete`, `settings`, `data`, `provenance` of its writer, `models` (of
        each row parameters, training FLOPs a token, seconds a step, configuration), `timed` (where steps were timed), `runs`
        (all, the failed ones too), and `rows`: what `rank` finds.

    Raises:
        ValueError: a setting is out of range, or a folder holds something else.
        OSError: something could not be written.
    """
    _check(settings)
    prepared = prepare_data(data)
    shared = {"max_position_embeddings": data.block_size, "sliding_window": max(1, data.block_size // 8)}
    configs = {
        name: with_vocabulary(kind(**shared | settings.model | changes), prepared.tokenizer)
        for name, (kind, changes) in settings.rows.items()
    }
    models = {name: describe(config, data.block_size) for name, config in configs.items()}
    step = data.block_size * settings.train.get("batch_size", 16) * settings.train.get("gradient_accumulation", 1)
    steps = math.ceil(settings.tokens / step)
    planned = settings.seeds * steps * step * sum(model["flops_per_token"] for model in models.values())
    runs = Runs("ablation", out, work, planned, console)
    times = step_times(configs, prepared, {k: v for k, v in settings.train.items() if k != "learning_rate"}, out, console)
    for name, about in models.items():
        about["step_seconds"] = times["seconds"][name]
    report: dict[str, Any] = {
        "format": 1,
        "study": "ablation",
        "complete": False,
        "settings": {
            "data": asdict(data) | {"data": list(data.data)},
            "model": settings.model,
            "tokens": steps * step,
            "tokens_per_step": step,
            "seeds": settings.seeds,
            "train": settings.train,
        },
        "data": {name: value for name, value in prepared.summary.items() if name != "cached"},
        "provenance": provenance(),
        "models": models,
        "timed": times["provenance"],
        "runs": [],
    }
    for seed in range(settings.seeds):
        for name, config in configs.items():
            run = runs.get(f"{_slug(name)}-seed{seed}", config, prepared, settings.train | {"steps": steps, "seed": seed})
            del run["evaluations"]
            report["runs"].append({"row": name} | run)
            report["complete"] = len(report["runs"]) == settings.seeds * len(configs)
            report["rows"] = rank(report["runs"], models)
            with explained_disk_errors("the summary", out):
                write_json(out / "summary.json", report)
                write_text(out / "paragraph.md", paragraph(report) + "\n")
                plot_ablation(report, out)
    return report


def rank(runs: list[Run], models: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, best first; those of which no run finished last.

    Args:
        runs: each with `row`, `error` and `loss`.
        models: of each row `parameters`, `flops_per_token` and `step_seconds`.

    Returns:
        Of each row `row`, `parameters`, `flops_per_token`, `step_seconds`, `loss` (spread over seeds) and `diverged` (how many
        runs).
    """
    rows = []
    for name in dict.fromkeys(run["row"] for run in runs):
        these = [run for run in runs if run["row"] == name]
        rows.append(
            {
                "row": name,
                **{what: models[name][what] for what in ("parameters", "flops_per_token", "step_seconds")},
                "loss": spread([run["loss"] for run in these if run["error"] is None]),
                "diverged": sum(run["error"] is not None for run in these),
            }
        )
    return sorted(rows, key=lambda row: math.inf if row["loss"]["mean"] is None else row["loss"]["mean"])


def paragraph(report: dict[str, Any]) -> str:
    """The summary as text and table, for a README."""
    settings = report["settings"]
    seeds = f"{settings['seeds']} seed{'s' * (settings['seeds'] > 1)}"
    lines = [
        f"{len(report['rows'])} models of one shape ({settings['model']['num_hidden_layers']} layers, "
        f"E={settings['model']['hidden_size']}, N={settings['model']['num_attention_heads']}), "
        f"{settings['tokens'] / 1e6:.1f} M tokens each, the same data in the same order and the same learning rate "
        f"({settings['train']['learning_rate']:g}), {seeds}; best first.",
        "",
        "| | validation loss | parameters | training MFLOP a token | seconds a step |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        mean, sd = row["loss"]["mean"], row["loss"]["sd"]
        loss = "" if mean is None else f"{mean:.4f}" + ("" if sd is None else f" ± {sd:.4f}")
        if row["diverged"]:
            loss += f" ({row['diverged']} diverged)"
        cost = f"{row['parameters'] / 1e6:.3f} M | {row['flops_per_token'] / 1e6:.2f} | {row['step_seconds']:.3f}"
        lines.append(f"| {row['row']} | {loss.strip()} | {cost} |")
    if not report["complete"]:
        lines += ["", "The ablation is not complete."]
    return "\n".join(lines)


def _slug(name: str) -> str:
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.replace("++", "pp")).split())


def _check(settings: Ablation) -> None:
    for name in ("tokens", "seeds"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name}={getattr(settings, name)} must be at least 1")
    if not settings.rows:
        raise ValueError("rows={} must have at least one row")
