"""Trains a DCFormer and the same-size Transformer++ on equal data, and writes how they compare."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from dcformer.models.counts import count_parameters
from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.plot import plot_curves
from dcformer.studies.provenance import provenance
from dcformer.studies.report import NAMES, summarize
from dcformer.studies.runs import describe, train_run
from dcformer.training import DataSettings, TrainSettings, prepare_data, with_vocabulary
from dcformer.training.files import explained_disk_errors, write_json

Equal = Literal["parameters", "shape"]


@dataclass(frozen=True)
class Preset:
    """Settings that belong together.

    Attributes:
        model: arguments of `DCFormerConfig`.
        data: the text.
        train: arguments of `TrainSettings`.
    """

    model: dict[str, Any]
    data: DataSettings = field(default_factory=DataSettings)
    train: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    # Small enough for a few minutes on 2 cores. Both models share every setting. The learning rate, and the share of it that
    # composition weights take, are the best of the grid that benchmarks/demo_learning_rates.py trains.
    "demo": Preset(
        model={
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
            "initializer_range": 0.06,
        },
        data=DataSettings(vocab_size=2048, block_size=256),
        train={
            "steps": 100,
            "batch_size": 16,
            "learning_rate": 6e-3,
            "composition_learning_rate_ratio": 0.3,
            "eval_every": 10,
            "eval_rows": 128,
        },
    )
}


def compare(
    config: DCFormerConfig,
    data: DataSettings,
    settings: TrainSettings,
    *,
    seeds: int = 1,
    equal: Equal = "parameters",
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains both models with every seed, and writes the report after each run.

    Data, its order, learning rate and all other settings are the same for both. A comparison that was stopped goes on where it
    was; finished runs are not run again, and more seeds may be added. A run that diverges is listed with its reason.

    `settings.out` then holds compare.json, curves.png, curves.svg and a folder for each run: `dcformer` and `transformer` for
    the first seed, `dcformer-seed1`, `transformer-seed1`, ... for the others.

    Args:
        config: the DCFormer. Its `vocab_size` is replaced by that of the data's tokenizer.
        data: what to train on.
        settings: how; `seed` is the first seed.
        seeds: how many seeds.
        equal: "parameters" widens the Transformer's MLP until it has as many; "shape" leaves it as the DCFormer's.
        console: where progress is shown; None: nowhere.

    Returns:
        What compare.json holds: `format`, `complete`, `settings`, `data`, `provenance` of the writing process, `models`
        (parameters, training FLOPs a token, configuration), `runs` and what `dcformer.studies.report.summarize` finds.
        `tokens_per_second` is the median step's: the first may wait for a compiler.

    Raises:
        ValueError: `seeds`, `equal` or another setting is out of range, or `settings.out` holds something else.
        OSError: something could not be written.
    """
    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    if config.compose is None:
        raise ValueError("config.compose=None is a plain Transformer already; give a DCFormer, the baseline is made from it")
    prepared = prepare_data(data)
    config = with_vocabulary(config, prepared.tokenizer)
    configs = {"dcformer": config, "transformer": baseline(config, equal)}
    models = {model: describe(configs[model], data.block_size) for model in NAMES}
    out, here = Path(settings.out), provenance()
    earlier = _earlier_runs(out)
    report: dict[str, Any] = {
        "format": 1,
        "complete": False,
        "settings": {
            "seeds": seeds,
            "equal": equal,
            "data": asdict(data) | {"data": list(data.data)},
            "train": _without(asdict(settings), "out"),
        },
        "data": _without(prepared.summary, "cached"),
        "provenance": here,
        "models": models,
        "runs": [],
    }
    for seed, model in product(range(seeds), NAMES):
        folder = model if seed == 0 else f"{model}-seed{seed}"
        run_settings = replace(settings, out=str(out / folder), seed=settings.seed + seed)
        run = train_run(configs[model], prepared, run_settings, console)
        report["runs"].append({"model": model, "folder": folder, "provenance": earlier.get(folder, here)} | run)
        report["complete"] = len(report["runs"]) == seeds * len(NAMES)
        report |= summarize(report["runs"], {name: models[name]["flops_per_token"] for name in NAMES})
        with explained_disk_errors("the comparison", out):
            write_json(out / "compare.json", report)
    with explained_disk_errors("the plot", out):
        plot_curves(report, out)
    return report


def baseline(config: DCFormerConfig, equal: Equal = "parameters") -> DCFormerConfig:
    """The plain Transformer++ to compare a DCFormer with.

    Args:
        config: the DCFormer.
        equal: "parameters": the MLP is widened to the nearest number of parameters, at most half a unit of width away; "shape":
            all sizes stay.

    Raises:
        ValueError: `equal` is neither.
    """
    if equal not in ("parameters", "shape"):
        raise ValueError(f'equal={equal!r} is unknown; choose "parameters" or "shape"')
    plain = copy.deepcopy(config)
    plain.compose = None
    if equal == "parameters":
        missing = count_parameters(config).total - count_parameters(plain).total
        wider = copy.deepcopy(plain)
        wider.intermediate_size += 1
        plain.intermediate_size += round(missing / (count_parameters(wider).total - count_parameters(plain).total))
    return plain


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


def _earlier_runs(out: Path) -> dict[str, Any]:
    """Where the runs that are finished already were made, by folder: this process may be on another machine."""
    path = out / "compare.json"
    if not path.exists():
        return {}
    try:
        runs = json.loads(path.read_text())["runs"]
        return {run["folder"]: run["provenance"] for run in runs if (out / run["folder"] / "result.json").exists()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report of a comparison; another folder would do") from error
