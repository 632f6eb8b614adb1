"""The folder of a run: checkpoints, the finished model, what the run is and was. Everything in it is complete or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.trainer_utils import get_last_checkpoint

from dcformer.training.files import publish, write_json

_MANIFEST = "manifest.json"


class RunFolder:
    """Where a run lives.

        run.json          which run it is: settings, configuration, data; written first
        metrics.jsonl     a line a step and evaluation
        checkpoint-N/     while it runs: all that is needed to go on after step N
        config.json, model.safetensors, tokenizer.json, ...   when it is finished
        result.json       what came out; written last, marks a finished run
        .partial/         what is being written right now; never read, removed at the next start

    Args:
        out: the folder; need not exist.
    """

    def __init__(self, out: str):
        self.path = Path(out)
        self.partial = self.path / ".partial"
        self.metrics = self.path / "metrics.jsonl"

    def open(self, run: dict[str, Any]) -> None:
        """Makes the folder for this run, or checks that it is this run's already.

        Raises:
            ValueError: it holds another run, or a model that is none of ours.
        """
        run = json.loads(json.dumps(run))
        record = self.path / "run.json"
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"out={str(self.path)!r} is a file; a folder is needed")
        if record.exists():
            if differences := _differences(json.loads(record.read_text()), run):
                raise ValueError(
                    f"out={str(self.path)!r} holds another run: {'; '.join(differences)}. With the same settings it would go "
                    "on; another folder would do for a new run"
                )
        elif (self.path / "config.json").exists() or self._checkpoints():
            raise ValueError(f"out={str(self.path)!r} holds a model that no run here wrote; an empty folder would do")
        self.path.mkdir(parents=True, exist_ok=True)
        self.clean()
        if not record.exists():
            write_json(record, run)

    def clean(self) -> None:
        """Removes what was left half-written."""
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in self.path.glob(".*.partial"):
            path.unlink()

    @property
    def is_finished(self) -> bool:
        """Whether `finish` has done its work."""
        return (self.path / "result.json").exists()

    def result(self) -> dict[str, Any]:
        """What `finish` stored."""
        return json.loads((self.path / "result.json").read_text())

    def publish_checkpoint(self, step: int, keep: int) -> None:
        """Gives the complete checkpoint under `partial` its place, and removes all but the newest `keep`."""
        name = f"checkpoint-{step}"
        finished = self.partial / name
        write_json(finished / _MANIFEST, {path.name: _digest(path) for path in sorted(finished.iterdir())})
        publish(finished, self.path / name)
        for old in self._checkpoints()[:-keep]:
            self._remove(old)

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint, its content verified.

        Raises:
            ValueError: a file of it is damaged; the message names the file and what to do.
        """
        found = get_last_checkpoint(str(self.path))
        if found is None:
            return None
        checkpoint = Path(found)
        try:
            manifest = json.loads((checkpoint / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise self._damaged(checkpoint, checkpoint / _MANIFEST, str(error)) from error
        for name, digest in manifest.items():
            path = checkpoint / name
            if not path.exists():
                raise self._damaged(checkpoint, path, "it is missing")
            if _digest(path) != digest:
                raise self._damaged(checkpoint, path, "its content is not what was written")
        return checkpoint

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, result: dict[str, Any]) -> None:
        """Saves the model and tokenizer into the folder itself, then the result, then removes the checkpoints."""
        staged = self.partial / "model"
        try:
            model.save_pretrained(staged)
            tokenizer.save_pretrained(staged)
            # Weights last: who finds them finds all that belongs to them.
            for path in sorted(staged.iterdir(), key=lambda path: (path.name.startswith("model"), path.name)):
                publish(path, self.path / path.name)
        finally:
            self.clean()
        write_json(self.path / "result.json", result)
        self.tidy()

    def tidy(self) -> None:
        """Removes what a finished run no longer needs."""
        for checkpoint in self._checkpoints():
            self._remove(checkpoint)
        self.clean()

    def _checkpoints(self) -> list[Path]:
        return sorted(self.path.glob("checkpoint-[0-9]*"), key=lambda path: int(path.name.rpartition("-")[2]))

    def _remove(self, checkpoint: Path) -> None:
        """By way of `partial`, so that a kill in between leaves no checkpoint that lacks files."""
        self.partial.mkdir(exist_ok=True)
        os.rename(checkpoint, self.partial / f"old-{checkpoint.name}")
        self.clean()

    def _damaged(self, checkpoint: Path, path: Path, reason: str) -> ValueError:
        return ValueError(
            f"corrupt checkpoint: {path}: {reason}. Remove {checkpoint} to go on from the checkpoint before it, or all of "
            f"{self.path} to start again"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(there: Any, asked: Any, name: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(asked, dict):
        keys = sorted({*there, *asked})
        return [line for key in keys for line in _differences(there.get(key), asked.get(key), f"{name}.{key}".lstrip("."))]
    return [] if there == asked else [f"{name} is {there!r} there and {asked!r} here"]
