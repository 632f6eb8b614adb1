"""The record of a run: a JSON line a step and evaluation, TensorBoard where installed, and a stop when the loss diverges."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dcformer.training.files import explained_disk_errors, write_text


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, an incomplete last one left out; no lines where there is no file.

    Every line has `split`, `step`, `tokens` and `seconds` (both of training so far) and `loss` (nats a token). "train" lines
    add `grad_norm`, `learning_rate` and `tokens_per_second`, "validation" lines `perplexity` and `bits_per_byte`.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class MetricsCallback(TrainerCallback):
    """Writes what the Trainer logs, and keeps the time of training, evaluations and checkpoints not counted.

    Args:
        path: of metrics.jsonl.
        tokens_per_step: tokens that one step sees.
        bytes_per_token: of the validation text.
        show: called with every line.

    Raises:
        FloatingPointError: while training, when the loss or the gradients are no longer finite.
    """

    def __init__(self, path: Path, tokens_per_step: int, bytes_per_token: float, show: Callable[[dict[str, Any]], None]):
        self.path, self.tokens_per_step, self.bytes_per_token, self.show = path, tokens_per_step, bytes_per_token, show
        self.seconds = 0.0
        self.board: Any = None

    def go_on_after(self, step: int) -> None:
        """Drops lines after `step`, which will be written again, and goes on with the time that training had taken.

        To be called before training, in the process that writes.
        """
        lines = [line for line in read_metrics(self.path) if line["step"] <= step]
        self.seconds = lines[-1]["seconds"] if lines else 0.0
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # Written anew from the record: a killed process takes what TensorBoard had buffered with it.
            folder = self.path.parent / "tensorboard"
            shutil.rmtree(folder, ignore_errors=True)
            self.board = SummaryWriter(str(folder))
            for line in lines:
                self._draw(line)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Starts the clock."""
        self._start_clock()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Closes TensorBoard's file."""
        if self.board is not None:
            self.board.close()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leaves the evaluation's time out."""
        self._start_clock()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leaves the checkpoint's time out."""
        self._start_clock()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a line."""
        step, logs = state.global_step, logs or {}
        if "loss" in logs:
            lap = time.perf_counter() - self._started
            self.seconds += lap
            measured = {name: logs[name] for name in ("loss", "grad_norm", "learning_rate")}
            measured["tokens_per_second"] = self.tokens_per_step / lap
            self._start_clock()
        elif "eval_loss" in logs:
            loss = logs["eval_loss"]
            measured = {
                "loss": loss,
                "perplexity": math.exp(loss) if loss < 700 else math.inf,
                "bits_per_byte": loss / math.log(2) / self.bytes_per_token,
            }
        else:  # the Trainer's own summary at the end
            return
        split = "train" if "loss" in logs else "validation"
        for name, value in measured.items():
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"training diverged: {name} of the {split} split is {value} at step {step}. A lower learning_rate or more "
                    f"warmup_steps may help. All steps before are in {self.path}"
                )
        self._write(
            {"split": split, "step": step, "tokens": step * self.tokens_per_step, "seconds": self.seconds, **measured}, state
        )

    def _start_clock(self) -> None:
        self._started = time.perf_counter()

    def _write(self, line: dict[str, Any], state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        with explained_disk_errors("metrics", self.path.parent):
            with self.path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
            self._draw(line)
        self.show(line)

    def _draw(self, line: dict[str, Any]) -> None:
        if self.board is not None:
            for name, value in line.items():
                if name not in ("split", "step"):
                    self.board.add_scalar(f"{line['split']}/{name}", value, line["step"])
