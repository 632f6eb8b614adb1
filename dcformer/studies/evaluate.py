"""Evaluation by lm-eval: tasks in, figures with their origin out."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from dcformer.studies.provenance import provenance

# What of lm-eval's report is kept, as lm-eval names it: no paths of a machine, no code of tasks.
_KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: list[str],
    *,
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    answers: Path | None = None,
) -> dict[str, Any]:
    """Runs tasks of lm-eval on a model.

    Args:
        model: a causal language model of transformers, on the device to run on.
        tokenizer: its tokenizer.
        tasks: names or patterns, of lm-eval's tasks or of those in `include_path`.
        include_path: folder with task files, which win over lm-eval's of the same name.
        num_fewshot: solved examples before each question; `None` leaves it to the task.
        limit: rows a task, the first ones; `None` takes all.
        batch_size: rows the model sees at once.
        answers: file to keep the model's answers in while it runs, to which lm-eval adds an ending. What is found there is not
            asked again, so it must be of the same model.

    Returns:
        lm-eval's report without samples, JSON-ready, with the `settings`, the `provenance`, and as `chance` the accuracy that
        guessing is expected to reach in tasks with choices.

    Raises:
        ValueError: for a task that nobody knows.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with redirect_stdout(sys.stderr):  # lm-eval prints what it is at
        found: Any = simple_evaluate(
            HFLM(model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(tasks),
            task_manager=_task_manager(tasks, include_path),
            num_fewshot=num_fewshot,
            limit=limit,
            use_cache=str(answers) if answers else None,
            bootstrap_iters=1000,
        )
    settings = {"tasks": tasks, "num_fewshot": num_fewshot, "limit": limit, "batch_size": batch_size}
    kept = {key: found[key] for key in _KEPT if key in found}
    return kept | {"chance": _chance(found), "settings": settings, "provenance": provenance()}


def _task_manager(tasks: list[str], include_path: Path | None) -> Any:
    """Knows the given tasks. Reading lm-eval's own fourteen thousand takes long, so only where one of them is asked for."""
    from lm_eval.tasks import TaskManager

    unknown = tasks
    for include_defaults in [False, True] if include_path else [True]:
        manager = TaskManager(include_path=include_path, include_defaults=include_defaults)
        unknown = [task for task in tasks if not manager.match_tasks([task])]
        if not unknown:
            return manager
    where = f" nor in {include_path}" if include_path else ""
    raise ValueError(f"tasks={', '.join(unknown)}: not among lm-eval's{where}; `lm-eval ls tasks` lists them")


def _chance(found: dict[str, Any]) -> dict[str, float]:
    """Of each task with choices: the mean over its rows of one in the number of choices."""
    chance = {}
    for task, rows in found["samples"].items():
        if found["configs"][task]["output_type"] == "multiple_choice":
            chance[task] = sum(1 / len(row["arguments"]) for row in rows) / len(rows)
    return chance
