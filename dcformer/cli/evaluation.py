"""`dcformer evaluate`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from dcformer.cli.common import Checkpoint, load

_SETTINGS = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def evaluate(
    checkpoint: Checkpoint,
    tasks: Annotated[list[str], typer.Option(help="Tasks of lm-eval or your own, comma-separated; may be repeated.")],
    out: Annotated[Path, typer.Option(help="JSON file for the figures. A command that was stopped goes on when given again.")],
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with task files of your own, which win over lm-eval's.", show_default=False)
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question.", show_default="the task's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows a task.", show_default="all")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 8,
) -> None:
    """Evaluate a trained model on tasks of lm-eval."""
    from lm_eval.utils import make_table

    from dcformer.studies.evaluate import evaluate as run_tasks
    from dcformer.training.files import explained_disk_errors, write_json

    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"include_path={include_path} is no folder")
    model, tokenizer = load(checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    fingerprint = _fingerprint(checkpoint, getattr(model.config, "_commit_hash", None))
    answers = out.with_name(f".{out.name}.{fingerprint}")
    report = run_tasks(
        model,
        tokenizer,
        [name.strip() for names in tasks for name in names.split(",")],
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        answers=answers,
    )
    with explained_disk_errors("the figures", out.parent):
        write_json(out, {"checkpoint": checkpoint, **report})
    for kept in out.parent.glob(f"{answers.name}*"):
        kept.unlink()
    typer.echo(make_table(report))
    for task, chance in report["chance"].items():
        typer.echo(f"{task}: guessing gives {chance:.4f}")
    typer.echo(f"Figures: {out}")


def _fingerprint(checkpoint: str, commit: str | None) -> str:
    """Changes with the weights and settings, so that answers of one model are never taken for another's."""
    folder = Path(checkpoint)
    parts = [path for path in folder.glob("*") if path.suffix in {".safetensors", ".bin"} or path.name in _SETTINGS]
    seen = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in parts)
    return hashlib.sha256(repr((checkpoint, commit, seen)).encode()).hexdigest()[:16]
