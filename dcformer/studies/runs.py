"""Runs of a study. Each is trained once: it is found again by what it is, whenever and wherever it was trained."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

from dcformer.models.counts import count_flops, count_parameters
from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.provenance import provenance
from dcformer.studies.report import Run
from dcformer.studies.rivals import RivalConfig
from dcformer.training import PreparedData, TrainSettings, train
from dcformer.training.files import explained_disk_errors, write_text
from dcformer.training.metrics import read_metrics
from dcformer.training.trainer import identity

_TRAIN_LINES = 100  # of a run's steps that its record keeps, about


def describe(config: DCFormerConfig, length: int) -> dict[str, Any]:
    """Parameters, training FLOPs a token in rows of `length` tokens, and the configuration; JSON-ready."""
    parameters, flops = count_parameters(config).total, count_flops(config, length).total
    if isinstance(config, RivalConfig):
        parameters, flops = parameters + config.more_parameters(), flops + config.more_flops(length)
    return {
        "parameters": parameters,
        "flops_per_token": 3 * flops,  # forward, and twice as much backward
        "config": config.to_diff_dict(),
    }


def train_run(config: DCFormerConfig, data: PreparedData, settings: TrainSettings, console: Console | None) -> Run:
    """Trains, or takes what is there, and returns what `dcformer.studies.report` works with; divergence is an outcome."""
    try:
        train(config, data, settings, console=console)
        error = None
    except FloatingPointError as diverged:
        error = str(diverged)
    return _as_run(read_metrics(Path(settings.out, "metrics.jsonl")), settings.seed, error)


class Runs:
    """The runs of a study.

        OUT/runs/NAME-KEY.jsonl   a finished or diverged run: what it was, then its evaluations and some of its steps
        WORK/NAME-KEY/            checkpoints while it runs, the model when it is done

    KEY is a digest of configuration, settings and data. Who has the first folder need not train again; the second may go.

    Args:
        study: its name, which its summary has, too.
        out: folder of the study.
        work: folder for what is too large to keep.
        planned: FLOPs of all runs together, from which the time left is reckoned.
        console: where progress is shown; None: nowhere.

    Raises:
        ValueError: `out` cannot be a folder, or has the summary of something else.
    """

    def __init__(self, study: str, out: Path, work: Path, planned: float, console: Console | None):
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"out={str(out)!r} cannot be a folder ({error.strerror}); choose another") from error
        _check_summary(out / "summary.json", study)
        self.records, self.work, self.console = out / "runs", work, console
        self.planned, self.flops, self.seconds = planned, 0.0, 0.0
        self.provenance = provenance()

    def get(self, name: str, config: DCFormerConfig, data: PreparedData, settings: dict[str, Any]) -> Run:
        """The outcome of a run, trained now where it is not there yet.

        Args:
            name: what people call it; it plays no part in finding the run again.
            config: the model.
            data: what to train on.
            settings: arguments of `TrainSettings`, without `out`.

        Returns:
            As `train_run`, with `name`, `file` (of its record), `machine` (of the process that finished it), `parameters`,
            `tokens`, `flops` (of the whole training) and `loss` (the last evaluation's; `None` where it diverged).

        Raises:
            ValueError, OSError: as `dcformer.training.train`; a record is damaged.
        """
        settings = {"save_every": max(1, settings["steps"] // 100), **settings}  # a kill costs a hundredth at most
        is_what = json.loads(json.dumps(identity(config, data, TrainSettings(out="", **settings))))
        key = hashlib.sha256(json.dumps(is_what, sort_keys=True).encode()).hexdigest()[:12]
        found = sorted(self.records.glob(f"*-{key}.jsonl"))
        path = found[0] if found else self.records / f"{name}-{key}.jsonl"
        if not found:
            self._show(name)
            self._train(path, is_what, config, data, TrainSettings(out=str(self.work / path.stem), **settings))
        head, *lines = _read(path)
        run = _as_run(lines, head["run"]["settings"]["seed"], head["error"])
        about = {name: head[name] for name in ("parameters", "tokens", "flops", "tokens_per_second")}
        loss = None if run["error"] else run["evaluations"][-1]["loss"]
        self.flops, self.seconds = self.flops + head["flops"], self.seconds + run["seconds"]
        machine = head["provenance"]["machine"]
        return {"name": name, "file": path.name, "machine": machine, **run, **about, "loss": loss}

    def _train(
        self, path: Path, is_what: dict[str, Any], config: DCFormerConfig, data: PreparedData, settings: TrainSettings
    ) -> None:
        run = train_run(config, data, settings, self.console)
        lines = read_metrics(Path(settings.out, "metrics.jsonl"))
        length = len(data.train[0]["input_ids"])
        about = describe(config, length)
        tokens = settings.steps * settings.batch_size * settings.gradient_accumulation * length
        head = {
            "split": "run",
            "error": run["error"],
            "parameters": about["parameters"],
            "tokens": tokens,
            "flops": tokens * about["flops_per_token"],
            "tokens_per_second": run["tokens_per_second"],
            "run": is_what,
            "provenance": self.provenance,
        }
        every = max(1, settings.steps // _TRAIN_LINES)
        kept = [line for line in lines if line["split"] == "validation" or line["step"] % every == 0]
        self.records.mkdir(parents=True, exist_ok=True)
        with explained_disk_errors("the record of a run", self.records):
            write_text(path, "".join(json.dumps(line) + "\n" for line in [head, *kept]))

    def _show(self, name: str) -> None:
        if self.console is None:
            return
        left = ""
        if self.seconds:
            hours = (self.planned - self.flops) * self.seconds / self.flops / 3600
            left = f"; all that is left takes about {hours:.1f} h"
        done = f"{self.flops / self.planned:.0%} of the FLOPs done"
        self.console.print(f"{name}: {done}{left}", highlight=False)


def _as_run(lines: list[dict[str, Any]], seed: int, error: str | None) -> Run:
    speeds = [line["tokens_per_second"] for line in lines if line["split"] == "train"]
    evaluations = [line for line in lines if line["split"] == "validation"]
    return {
        "seed": seed,
        "error": error,
        "evaluations": [{name: value for name, value in line.items() if name != "split"} for line in evaluations],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds": lines[-1]["seconds"] if lines else 0.0,
    }


def _check_summary(path: Path, study: str) -> None:
    """Refuses to replace what is not of the study."""
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        ours = found.get("study", study) == study and "runs" in found
    except (ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{path} is no summary of {study}, which would replace it; move it, or choose another folder")


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_metrics(path)
        if lines and lines[0]["split"] == "run":
            return lines
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is no record of a run; remove it, and the run is trained again")
