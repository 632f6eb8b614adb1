"""How long a training step takes: models are measured in turn, so that a machine that slows down slows all of them."""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.provenance import provenance
from dcformer.training import PreparedData, TrainSettings, train
from dcformer.training.files import explained_disk_errors, write_json
from dcformer.training.metrics import read_metrics
from dcformer.training.trainer import identity

_ROUNDS, _STEPS, _WARM = 3, 6, 2  # the first steps of a round are not counted


def step_times(
    configs: dict[str, DCFormerConfig], data: PreparedData, settings: dict[str, Any], out: Path, console: Console | None
) -> dict[str, Any]:
    """Trains each model for a few steps, in three rounds, and keeps the medians in `out`/times.json.

    What is there already is taken, whatever machine it is from; remove the file to measure anew.

    Args:
        configs: of each name the model.
        data: what to train on.
        settings: arguments of `TrainSettings`, without those of a single run (`out`, `steps`, `learning_rate`, `seed`).
        out: folder of the study.
        console: where progress is shown; None: nowhere.

    Returns:
        JSON-ready: `seconds` a step by name, `provenance` of the measurement, `key`, a digest of what was measured.

    Raises:
        ValueError: the file is there and no such measurement.
        OSError: it could not be written.
    """
    settings = settings | {"steps": _STEPS, "eval_rows": 1, "eval_every": _STEPS, "save_every": _STEPS}
    what = {name: identity(config, data, TrainSettings(out="", **settings)) for name, config in configs.items()}
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]
    path = out / "times.json"
    if path.exists() and (found := _read(path))["key"] == key:
        return found
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(_ROUNDS):
        if console is not None:
            console.print(f"Steps of all models are timed: round {number + 1} of {_ROUNDS}", highlight=False)
        for name, config in configs.items():
            with tempfile.TemporaryDirectory() as folder:
                train(config, data, TrainSettings(out=folder + "/run", **settings))
                lines = [line for line in read_metrics(Path(folder, "run/metrics.jsonl")) if line["split"] == "train"]
            tokens = lines[0]["tokens"]
            seconds[name] += [tokens / line["tokens_per_second"] for line in lines[_WARM:]]
    found = {"key": key, "provenance": provenance(), "seconds": {name: statistics.median(s) for name, s in seconds.items()}}
    out.mkdir(parents=True, exist_ok=True)
    with explained_disk_errors("the times", out):
        write_json(path, found)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: found[name] for name in ("key", "provenance", "seconds")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no measurement of steps; remove it, and they are timed again") from error
