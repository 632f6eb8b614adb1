"""What the user sees of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_LINES = 20


class ProgressDisplay:
    """Shows lines of metrics.jsonl as they come. A context manager, since a bar must be closed.

    Args:
        console: where to; None: nowhere.
        name: what the run is called.
        steps: of the whole run.
    """

    def __init__(self, console: Console | None, name: str, steps: int):
        self.console, self.name, self.steps = console, name, steps
        self.bar: Progress | None = None
        if console is not None and console.is_terminal:
            columns = (
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task(name, total=steps, loss="")

    def __enter__(self) -> ProgressDisplay:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, line: dict[str, Any]) -> None:
        """One step or evaluation."""
        if self.console is None:
            return
        step = f"{self.name}: step {line['step']}/{self.steps}"
        if line["split"] == "validation":
            text = f"{step}  validation loss {line['loss']:.4f}  perplexity {line['perplexity']:.2f}"
            self.console.print(f"{text}  bits per byte {line['bits_per_byte']:.4f}", highlight=False)
            return
        speed = f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=line["step"], loss=speed)
        elif line["step"] % max(1, self.steps // _PLAIN_LINES) == 0:
            left = (self.steps - line["step"]) * line["seconds"] / line["step"]
            self.console.print(f"{step}  {speed}  {left:.0f} s left", highlight=False)
