"""Small models trained on a mixture of synthetic tasks, with and without composition: which predicts the bracketed words?"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.brackets import bracket_accuracy, task
from dcformer.studies.compare import baseline
from dcformer.studies.plot import plot_synthetic
from dcformer.studies.provenance import provenance
from dcformer.studies.report import NAMES, Run
from dcformer.studies.runs import Runs, describe
from dcformer.studies.tasks import families, texts, training_texts
from dcformer.studies.words import Split
from dcformer.training import DataSettings, PreparedData, prepare_data, with_vocabulary
from dcformer.training.files import explained_disk_errors, write_json, write_text

SPLITS: dict[Split, str] = {
    "seen": "new lines about words of the training",
    "unseen": "names, things and cities of no training task",
}


@dataclass(frozen=True)
class Synthetic:
    """What to train, and on what.

    Attributes:
        model: arguments of `DCFormerConfig`; the Transformer has the same shape.
        texts: of training.
        evaluated: texts of each family to evaluate on, in each split.
        tokens: to train each model on.
        vocab_size: of the tokenizer.
        block_size: tokens a row.
        seeds: how many.
        train: further arguments of `TrainSettings`, for all runs.
    """

    model: dict[str, Any] = field(
        default_factory=lambda: {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "tie_word_embeddings": True,
            "initializer_range": 0.073,
        }
    )
    texts: int = 80_000
    evaluated: int = 25
    tokens: int = 12_000_000
    vocab_size: int = 2048
    block_size: int = 256
    seeds: int = 1
    train: dict[str, Any] = field(
        default_factory=lambda: {
            "batch_size": 4,
            "learning_rate": 2e-3,
            "composition_learning_rate_ratio": 0.3,
            "eval_rows": 256,
        }
    )


def synthetic(settings: Synthetic, out: Path, work: Path, *, console: Console | None = None) -> dict[str, Any]:
    """Trains both models with every seed, or goes on where it was; writes the summary after each run.

    `out` then holds summary.json, synthetic.png, synthetic.svg, paragraph.md, runs/ with a small record of each run and
    accuracy/ with what each predicted. A run that is done is not done again.

    Args:
        settings: what to train.
        out: folder for the results.
        work: folder for texts, checkpoints and models.
        console: where progress is shown; None: nowhere.

    Returns:
        What summary.json holds: `format`, `study`, `complete`, `settings`, `data`, `provenance` of its writer, `models` (of
        each parameters, training FLOPs a token, configuration), `runs` (all; with `accuracy` by split and family, as
        `dcformer.studies.brackets.bracket_accuracy` finds it, `None` where a run diverged), and `accuracy` by split and model:
        of each family the mean over seeds, and their `mean`.

    Raises:
        ValueError: a setting is out of range, a folder holds something else, or a model that is not evaluated yet is gone.
        OSError: something could not be written.
    """
    for name in ("texts", "evaluated", "tokens", "seeds"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name}={getattr(settings, name)} must be at least 1")
    if console is not None:
        console.print("Texts are written and tokenized", highlight=False)
    prepared = _prepare(settings, work)
    ours = DCFormerConfig(max_position_embeddings=settings.block_size, **settings.model)
    ours = with_vocabulary(ours, prepared.tokenizer)
    configs = {"dcformer": ours, "transformer": baseline(ours, "shape")}
    models = {name: describe(config, settings.block_size) for name, config in configs.items()}
    step = settings.block_size * settings.train.get("batch_size", 16) * settings.train.get("gradient_accumulation", 1)
    steps = math.ceil(settings.tokens / step)
    planned = settings.seeds * steps * step * sum(model["flops_per_token"] for model in models.values())
    runs = Runs("synthetic", out, work, planned, console)
    report: dict[str, Any] = {
        "format": 1,
        "study": "synthetic",
        "complete": False,
        "settings": asdict(settings) | {"tokens": steps * step},
        "data": {name: value for name, value in prepared.summary.items() if name != "cached"},
        "provenance": provenance(),
        "models": models,
        "runs": [],
    }
    for seed in range(settings.seeds):
        for model, config in configs.items():
            run = runs.get(f"{model}-seed{seed}", config, prepared, settings.train | {"steps": steps, "seed": seed})
            del run["evaluations"]
            accuracy = _accuracy(run, settings.evaluated, prepared.tokenizer, out, work, console)
            report["runs"].append({"model": model} | run | {"accuracy": accuracy})
            report["complete"] = len(report["runs"]) == settings.seeds * len(configs)
            report["accuracy"] = summarize(report["runs"])
            with explained_disk_errors("the summary", out):
                write_json(out / "summary.json", report)
                write_text(out / "paragraph.md", paragraph(report) + "\n")
                plot_synthetic(report, out)
    return report


def summarize(runs: list[Run]) -> dict[str, dict[str, dict[str, Any]]]:
    """By split and model: the mean over seeds of each family (`families`), and their `mean`; `None` where no run finished."""
    found: dict[str, dict[str, dict[str, Any]]] = {split: {} for split in SPLITS}
    for split, model in ((split, model) for split in SPLITS for model in NAMES):
        these = [run["accuracy"][split] for run in runs if run["model"] == model and run["accuracy"]]
        names = these[0] if these else {}
        each = {family: fmean(run[family]["accuracy"] for run in these) for family in names}
        found[split][model] = {"mean": fmean(each.values()) if each else None, "families": each}
    return found


def paragraph(report: dict[str, Any]) -> str:
    """The summary as text and table, for a README."""
    settings, accuracy = report["settings"], report["accuracy"]
    of_first = accuracy["seen"]["dcformer"]["families"] or accuracy["seen"]["transformer"]["families"]
    layout, seeds = settings["model"], settings["seeds"]
    shape = f"{layout['num_hidden_layers']} layers, E={layout['hidden_size']}, N={layout['num_attention_heads']}"
    lines = [
        f"{len(of_first)} families of tasks in one mixture, {settings['tokens'] / 1e6:.1f} M tokens, a DCFormer and a "
        f"Transformer++ of the same shape ({shape}), {seeds} seed{'s' * (seeds > 1)}, trained on "
        "answers only; accuracy of the words in brackets, mean over families.",
        "",
        "| | DCFormer | Transformer++ |",
        "|---|---|---|",
    ]
    groups = dict.fromkeys(family.partition(":")[0] for family in of_first)
    for split, what in SPLITS.items():
        lines.append(f"| {what} | {' | '.join(_share(accuracy[split][model]['mean']) for model in NAMES)} |")
        for group in groups:
            cells = []
            for model in NAMES:
                these = [x for name, x in accuracy[split][model]["families"].items() if name.startswith(f"{group}:")]
                cells.append(_share(fmean(these) if these else None))
            lines.append(f"| ... {group} | {' | '.join(cells)} |")
    failed = [run["name"] for run in report["runs"] if run["error"] is not None]
    if failed:
        lines += ["", f"Diverged: {', '.join(failed)}."]
    if not report["complete"]:
        lines += ["", "The study is not complete."]
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _prepare(settings: Synthetic, work: Path) -> PreparedData:
    """Writes the training texts, tokenizes and packs them. Only answers are labels: all else is drawn by chance."""
    path = work / "texts" / "train.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with explained_disk_errors("training texts", path.parent):
        write_text(path, _lines({"text": text} for text in training_texts(settings.texts)))
    data = prepare_data(DataSettings(data=(str(path),), vocab_size=settings.vocab_size, block_size=settings.block_size))
    tokens = np.array(data.tokenizer.convert_ids_to_tokens(list(range(len(data.tokenizer)))))
    mask = partial(_answers, begins=np.char.startswith(tokens, "Ġ"), ends=np.isin(tokens, ["Ċ", data.tokenizer.eos_token]))
    train, validation = (split.map(mask, batched=True) for split in (data.train, data.validation))
    learned = [token for row in validation["labels"] for token in row if token != -100]
    bytes_per_token = len(str(data.tokenizer.decode(learned, skip_special_tokens=True)).encode()) / len(learned)
    fingerprint = _digest([data.summary["fingerprint"], train["labels"][:], validation["labels"][:]])
    summary = data.summary | {"fingerprint": fingerprint}
    return data._replace(train=train, validation=validation, bytes_per_token=bytes_per_token, summary=summary)


def _answers(rows: dict[str, Any], begins: np.ndarray, ends: np.ndarray) -> dict[str, Any]:
    """Labels of rows [B, T]: the last word of each line whose end is in the row, -100 for all other tokens.

    Args:
        rows: with `input_ids`.
        begins: [V], tokens that begin a word.
        ends: [V], tokens that end a line.
    """
    ids = np.array(rows["input_ids"])
    words, end = begins[ids].cumsum(1), ends[ids]
    # Of each place, how many words have begun before the next end of a line, more than there are where none follows.
    at_end = np.where(end, words, ids.shape[1] + 1)
    at_end = np.minimum.accumulate(at_end[:, ::-1], axis=1)[:, ::-1]
    return {"labels": np.where((words == at_end) & ~end, ids, -100)}


def _accuracy(
    run: Run, evaluated: int, tokenizer: Any, out: Path, work: Path, console: Console | None
) -> dict[str, dict[str, Any]] | None:
    """Of each split and family what the run's model predicts; from its file where it was asked before."""
    if run["error"] is not None:
        return None
    path = out / "accuracy" / run["file"]
    asked = {split: list(texts(split, evaluated * len(families()))) for split in SPLITS}
    head = {"evaluated": evaluated, "texts": _digest(asked)}
    if not path.exists() or _read(path)[0] != head:
        folder = work / path.stem
        if not (folder / "config.json").exists():
            raise ValueError(
                f"{folder} is gone, with a model that is not evaluated; remove {out / 'runs' / run['file']} to train it"
            )
        if console is not None:
            console.print(f"{run['name']}: its accuracy is measured", highlight=False)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        lines: list[dict[str, Any]] = [head]
        for split in SPLITS:
            found = bracket_accuracy(model, tokenizer, [task(*each) for each in asked[split]], console=console)
            lines += [{"split": split, "family": family} | figures for family, figures in found.items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        with explained_disk_errors("what a model predicts", path.parent):
            write_text(path, _lines(lines))
    by_split: dict[str, dict[str, Any]] = {split: {} for split in SPLITS}
    for line in _read(path)[1:]:
        by_split[line.pop("split")][line.pop("family")] = line
    return by_split


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
