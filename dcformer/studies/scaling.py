"""A ladder of sizes, each trained with and without composition on the same text: how much compute and time does it save?"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from dcformer.models.counts import count_parameters
from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.compare import baseline
from dcformer.studies.fit import multipliers
from dcformer.studies.plot import plot_scaling
from dcformer.studies.provenance import provenance
from dcformer.studies.report import NAMES, Run, spread
from dcformer.studies.runs import Runs, describe
from dcformer.studies.times import step_times
from dcformer.training import DataSettings, PreparedData, prepare_data, with_vocabulary
from dcformer.training.files import explained_disk_errors, write_json, write_text

# Named after their parameters without embeddings. Heads have 24 channels; MLPs are 8/3 of the width, as in the paper. Weights
# start with a standard deviation that falls with the width and is 0.06 at that of `compare`'s demo.
RUNGS = {
    name: {
        "hidden_size": 24 * heads,
        "intermediate_size": 64 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": True,
        "initializer_range": round(0.06 * (8 / heads) ** 0.5, 3),
    }
    for name, heads, layers in (("0.4M", 4, 4), ("1M", 6, 4), ("2.2M", 8, 5), ("4.1M", 10, 6), ("8M", 12, 8))
}


@dataclass(frozen=True)
class Ladder:
    """What to train.

    Attributes:
        rungs: of each size the arguments of `DCFormerConfig`, from small to large.
        tokens_per_parameter: training tokens for a parameter of the Transformer, embeddings not counted.
        seeds: how many; all rates are tried with the first.
        rates: learning rates to choose from.
        tuned: how many rungs try all rates; larger ones take the best of the last of these.
        train: further arguments of `TrainSettings`, for all runs.
    """

    rungs: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(RUNGS))
    tokens_per_parameter: float = 20.0
    seeds: int = 1
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    tuned: int = 2
    train: dict[str, Any] = field(
        default_factory=lambda: {"batch_size": 16, "composition_learning_rate_ratio": 0.3, "eval_rows": 512}
    )


@dataclass(frozen=True)
class _Rung:
    name: str
    configs: dict[str, DCFormerConfig]
    models: dict[str, dict[str, Any]]
    steps: int
    tokens: int


def scaling(data: DataSettings, ladder: Ladder, out: Path, work: Path, *, console: Console | None = None) -> dict[str, Any]:
    """Climbs the ladder, or goes on where it was; writes the summary after each run.

    Both models of a rung have the same shape, data, order of data, number of tokens and settings but for the learning rate,
    which is chosen for each from the same ones. A run that is done is not done again, wherever it was done.

    Steps of all models are timed first (see `dcformer.studies.times`), so that runs may share the machine or be of several.

    `out` then holds summary.json, scaling.png, scaling.svg, paragraph.md, times.json and runs/ with a small record of each
    run.

    Args:
        data: what to train on.
        ladder: which models, and how.
        out: folder for the results.
        work: folder for checkpoints and models.
        console: where progress is shown; None: nowhere.

    Returns:
        What summary.json holds: `format`, `study`, `complete`, `settings`, `data`, `provenance` of its writer, `rungs` (of each
        `parameters` without embeddings, `steps`, `tokens`, `epochs`, and both models' parameters, training FLOPs a token,
        seconds a step and configuration), `timed` (where the steps were timed), `rates` (chosen, by model and rung), `runs`
        (all, the failed ones and the worse rates too), and what `summarize` finds.

    Raises:
        ValueError: a setting is out of range, or a folder holds something else.
        OSError: something could not be written.
    """
    _check(ladder)
    prepared = prepare_data(data)
    rungs = [_rung(name, shape, ladder, prepared, data.block_size) for name, shape in ladder.rungs.items()]
    of_both = [sum(model["flops_per_token"] for model in rung.models.values()) * rung.tokens for rung in rungs]
    planned = sum(
        flops * (ladder.seeds - 1 + (len(ladder.rates) if i < ladder.tuned else 1)) for i, flops in enumerate(of_both)
    )
    runs = Runs("scaling", out, work, planned, console)
    shapes = {f"{model}-{rung.name}": config for rung in rungs for model, config in rung.configs.items()}
    times = step_times(shapes, prepared, ladder.train, out, console)
    for rung in rungs:
        for model, about in rung.models.items():
            about["step_seconds"] = times["seconds"][f"{model}-{rung.name}"]
    report: dict[str, Any] = {
        "format": 1,
        "study": "scaling",
        "complete": False,
        "settings": {
            "data": asdict(data) | {"data": list(data.data)},
            "ladder": asdict(ladder) | {"rates": list(ladder.rates)},
        },
        "data": {name: value for name, value in prepared.summary.items() if name != "cached"},
        "provenance": provenance(),
        "rungs": {
            rung.name: {
                "parameters": _without_embeddings(rung.configs["transformer"]),
                "steps": rung.steps,
                "tokens": rung.tokens,
                "epochs": rung.tokens / prepared.summary["train"]["tokens"],
                "models": rung.models,
            }
            for rung in rungs
        },
        "timed": times["provenance"],
        "rates": {model: {} for model in NAMES},
        "runs": [],
    }
    for i, rung in enumerate(rungs):
        for model in NAMES:
            before = list(report["rates"][model].values())
            for rate in ladder.rates if i < ladder.tuned else before[-1:]:
                _climb(report, runs, rung, model, rate, 0, ladder, prepared, out)
            report["rates"][model][rung.name] = rate = _best(report["runs"], rung.name, model)
            for seed in range(1, ladder.seeds):
                _climb(report, runs, rung, model, rate, seed, ladder, prepared, out)
        report["complete"] = i + 1 == len(rungs)
        _write(report, out)
        with explained_disk_errors("the plot", out):
            plot_scaling(report, out)
    return report


def summarize(runs: list[Run], rates: dict[str, dict[str, float]]) -> dict[str, Any]:
    """What the runs at the chosen rates say.

    Args:
        runs: each with `rung`, `model`, `learning_rate`, `seed`, `error`, `loss`, `flops`, `seconds`.
        rates: chosen, by model and rung.

    Returns:
        `losses`: spread over seeds by rung and model, of rungs where both models finished; `flops` and `seconds`: what
        `dcformer.studies.fit.multipliers` finds with that cost, its `at` with the `rung`; `at_edge`: model and rung where the
        best rate tried was the least or the largest; `failed`: names of runs that diverged.
    """
    finished = [run for run in runs if run["error"] is None and rates[run["model"]].get(run["rung"]) == run["learning_rate"]]
    of = {
        (rung, model): [run for run in finished if (run["rung"], run["model"]) == (rung, model)]
        for rung in dict.fromkeys(run["rung"] for run in finished)
        for model in NAMES
    }
    rungs = [rung for rung in dict.fromkeys(rung for rung, _ in of) if all(of[rung, model] for model in NAMES)]
    found: dict[str, Any] = {
        "losses": {rung: {model: spread([run["loss"] for run in of[rung, model]]) for model in NAMES} for rung in rungs},
        "at_edge": _at_edge(runs, rates),
        "failed": [run["name"] for run in runs if run["error"] is not None],
    }
    for cost in ("flops", "seconds"):
        points = {}
        for model in NAMES:
            these = [run for rung in rungs for run in of[rung, model]]
            points[model] = (np.array([run[cost] for run in these]), np.array([run["loss"] for run in these]))
        at = np.array([statistics.fmean(run[cost] for run in of[rung, "dcformer"]) for rung in rungs])
        found[cost] = multipliers(points, "dcformer", "transformer", at)
        found[cost]["at"] = [{"rung": rung} | each for rung, each in zip(rungs, found[cost]["at"], strict=False)]
    return found


def paragraph(report: dict[str, Any]) -> str:
    """The summary in words, for a README."""
    rungs = list(report["losses"])
    if not rungs:
        return "No rung has been finished by both models yet."
    ladder, last = report["settings"]["ladder"], rungs[-1]
    seeds = f"{ladder['seeds']} seed{'s' * (ladder['seeds'] > 1)}"
    text = [
        f"{len(rungs)} size{'s' * (len(rungs) > 1)} from {_size(report, rungs[0])} to {_size(report, last)} parameters without "
        f"embeddings, {ladder['tokens_per_parameter']:g} tokens a parameter, {seeds}; a DCFormer and a Transformer++ of the "
        "same shape on the same data in the same order, the learning rate chosen for each from "
        f"{', '.join(f'{rate:g}' for rate in ladder['rates'])}."
    ]
    losses = [
        f"{rung} {report['losses'][rung]['dcformer']['mean']:.4f} against {report['losses'][rung]['transformer']['mean']:.4f}"
        for rung in rungs
    ]
    text.append(f"Validation loss in nats a token, DCFormer against Transformer++: {'; '.join(losses)}.")
    for cost, noun in (("flops", "compute (FLOPs, composition included)"), ("seconds", "training time")):
        if report[cost]["at"]:
            text.append(
                f"At the loss that the DCFormer has, the Transformer++ needs {_times(report[cost]['at'][-1])} its {noun} at "
                f"{last}, by the fitted curves ({', '.join(_short(each) for each in report[cost]['at'])})."
            )
    text.append("The paper reports 1.7 to 2.0 times the compute at 405M to 6.9B parameters.")
    if report["at_edge"]:
        text.append(f"The best rate was the least or largest tried: {', '.join(report['at_edge'])}.")
    if report["failed"]:
        text.append(f"Diverged: {', '.join(report['failed'])}.")
    if not report["complete"]:
        text.append("The ladder is not complete.")
    return " ".join(text)


def _climb(
    report: dict[str, Any],
    runs: Runs,
    rung: _Rung,
    model: str,
    rate: float,
    seed: int,
    ladder: Ladder,
    data: PreparedData,
    out: Path,
) -> None:
    settings = ladder.train | {"steps": rung.steps, "learning_rate": rate, "seed": seed}
    run = runs.get(f"{model}-{rung.name}-lr{rate:g}-seed{seed}", rung.configs[model], data, settings)
    del run["evaluations"]
    run["seconds"] = rung.steps * rung.models[model]["step_seconds"]
    report["runs"].append({"rung": rung.name, "model": model, "learning_rate": rate} | run)
    _write(report, out)


def _write(report: dict[str, Any], out: Path) -> None:
    report |= summarize(report["runs"], report["rates"])
    with explained_disk_errors("the summary", out):
        write_json(out / "summary.json", report)
        write_text(out / "paragraph.md", paragraph(report) + "\n")


def _best(runs: list[Run], rung: str, model: str) -> float:
    """The rate with the least loss, of the first seed; the least rate where all diverged."""
    tried = [run for run in runs if (run["rung"], run["model"], run["seed"]) == (rung, model, 0)]
    finished = [run for run in tried if run["error"] is None]
    if not finished:
        return min(run["learning_rate"] for run in tried)
    return min(finished, key=lambda run: run["loss"])["learning_rate"]


def _at_edge(runs: list[Run], rates: dict[str, dict[str, float]]) -> list[str]:
    edges = []
    for model, chosen in rates.items():
        for rung, rate in chosen.items():
            tried = {run["learning_rate"] for run in runs if (run["rung"], run["model"]) == (rung, model)}
            if len(tried) > 1 and rate in (min(tried), max(tried)):
                edges.append(f"{NAMES[model]} at {rung}: {rate:g}")
    return edges


def _rung(name: str, shape: dict[str, Any], ladder: Ladder, data: PreparedData, length: int) -> _Rung:
    ours = with_vocabulary(DCFormerConfig(max_position_embeddings=length, **shape), data.tokenizer)
    configs = {"dcformer": ours, "transformer": baseline(ours, "shape")}
    step = length * ladder.train.get("batch_size", 16) * ladder.train.get("gradient_accumulation", 1)
    steps = max(1, round(ladder.tokens_per_parameter * _without_embeddings(configs["transformer"]) / step))
    return _Rung(name, configs, {model: describe(configs[model], length) for model in NAMES}, steps, steps * step)


def _without_embeddings(config: DCFormerConfig) -> int:
    counts = count_parameters(config)
    return round(counts.total - counts.embeddings)


def _check(ladder: Ladder) -> None:
    for name in ("seeds", "tuned"):
        if getattr(ladder, name) < 1:
            raise ValueError(f"{name}={getattr(ladder, name)} must be at least 1")
    if not ladder.tokens_per_parameter > 0:
        raise ValueError(f"tokens_per_parameter={ladder.tokens_per_parameter} must be above 0")
    if not ladder.rates or not all(rate > 0 for rate in ladder.rates):
        raise ValueError(f"rates={ladder.rates} must be at least one learning rate above 0")
    if not ladder.rungs:
        raise ValueError("rungs={} must have at least one size")


def _size(report: dict[str, Any], rung: str) -> str:
    return f"{report['rungs'][rung]['parameters'] / 1e6:.2f} M"


def _times(each: dict[str, Any]) -> str:
    if each["multiplier"] is None:
        return "more than any multiple of"
    interval = "no interval" if each["low"] is None else f"95 % interval {each['low']:.2f} to {_bound(each['high'])}"
    return f"{each['multiplier']:.2f} times ({interval}{', extrapolated' * each['extrapolated']})"


def _short(each: dict[str, Any]) -> str:
    return f"{each['rung']} {_bound(each['multiplier'])}"


def _bound(value: float | None) -> str:
    return "without bound" if value is None else f"{value:.2f}"
