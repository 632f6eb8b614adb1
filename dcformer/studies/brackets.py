"""How well a language model predicts the words in brackets of a file of tasks, in the format of the authors' synthetic tasks.

B texts at once, T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dcformer.studies.provenance import provenance

_BRACKETS = re.compile(r"\[ (.+?) \]")


class Task(NamedTuple):
    """A text with words to predict.

    Attributes:
        family: what kind of task it is, `task_id` in the file.
        text: without brackets.
        answers: where the bracketed words are in it, as start and end.
    """

    family: str
    text: str
    answers: list[tuple[int, int]]


def task(family: str, text: str) -> Task:
    """Takes the brackets out of a text, in which "[ word ]" marks a word to predict."""
    answers, plain, start = [], "", 0
    for found in _BRACKETS.finditer(text):
        plain += text[start : found.start()]
        answers.append((len(plain), len(plain) + len(found[1])))
        plain += found[1]
        start = found.end()
    return Task(family, plain + text[start:], answers)


def without_brackets(text: str) -> str:
    """A text as models read it."""
    return _BRACKETS.sub(r"\1", text)


def read_tasks(path: Path) -> list[Task]:
    """A JSONL file whose rows have `task_id` and `texts`.

    Raises:
        ValueError: there is no such file, or it is not UTF-8, or a line is none of that, or no text has brackets.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8: {error}") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            each = task(str(row["task_id"]), row["texts"])
            each.text.encode()  # no half of a surrogate pair, which no tokenizer takes
        except (ValueError, KeyError, TypeError) as error:
            example = '{"task_id": "owns", "texts": "Bo owns a kind of [ fruit ]"}'
            raise ValueError(f"{path}, line {number}, must be such as {example}: {error!r}") from error
        tasks.append(each)
    if not any(start for each in tasks for start, _ in each.answers):
        raise ValueError(f'{path} has no words in brackets after others, such as "has a kind of [ fruit ]"')
    return tasks


def bracket_accuracy(
    model: Any, tokenizer: Any, tasks: Iterable[Task], *, batch_size: int = 8, console: Console | None = None
) -> dict[str, dict[str, float]]:
    """Reads the texts with a causal language model and looks what it expects where the words are.

    A word is right where each of its tokens is the likeliest after all that stands before it. One that begins the text is left
    out.

    Args:
        model: of transformers, on the device to run on.
        tokenizer: its tokenizer, a fast one.
        tasks: the texts.
        batch_size: B.
        console: where progress is shown; None: nowhere.

    Returns:
        By family, `words` (how many), `accuracy` (share of them that is right) and `loss` (nats a word, mean).

    Raises:
        ValueError: the tokenizer does not say where its tokens are, or a text is longer than the model's context.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, which does not say where tokens are; a fast one would do")
    found: dict[str, list[tuple[bool, float]]] = {}
    tasks = list(tasks)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
    for each in tasks:
        if (length := len(tokenizer(each.text)["input_ids"])) > most:
            raise ValueError(f"a text of {each.family!r} has {length} tokens; the model takes at most {most}")
    batches = [tasks[start : start + batch_size] for start in range(0, len(tasks), batch_size)]
    hidden = console is None or not console.is_terminal
    for batch in track(batches, "texts", console=console, disable=hidden):
        for each, words in zip(batch, _words(model, tokenizer, batch), strict=True):
            found.setdefault(each.family, []).extend(words)
    return {
        family: {
            "words": len(words),
            "accuracy": sum(right for right, _ in words) / len(words),
            "loss": sum(loss for _, loss in words) / len(words),
        }
        for family, words in found.items()
        if words
    }


@torch.inference_mode()
def _words(model: Any, tokenizer: Any, tasks: list[Task]) -> list[list[tuple[bool, float]]]:
    """For each text, for each of its words: whether it is right, and its loss."""
    encoded = tokenizer([each.text for each in tasks], return_offsets_mapping=True)
    length = max(map(len, encoded["input_ids"]))
    # Padding stands behind, where no causal model sees it.
    rows = [row + [0] * (length - len(row)) for row in encoded["input_ids"]]
    ids = torch.tensor(rows, device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()  # [B, T-1, V]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").cpu()
    right = (logits.argmax(-1) == ids[:, 1:]).cpu()
    found = []
    for row, each in enumerate(tasks):
        words = []
        for start, end in each.answers:
            places = [i - 1 for i, (a, b) in enumerate(encoded["offset_mapping"][row]) if a < end and b > start]
            if places and places[0] >= 0:
                words.append((bool(right[row, places].all()), losses[row, places].sum().item()))
        found.append(words)
    return found


def report_on(path: Path, found: dict[str, dict[str, float]], checkpoint: str) -> dict[str, Any]:
    """What `dcformer study brackets` writes.

    Args:
        path: of the tasks.
        found: by `bracket_accuracy`.
        checkpoint: what the report calls the model.

    Returns:
        `format`, `checkpoint`, `tasks` (name and SHA-256 of the file), `provenance`, `families`, and their means `accuracy` and
        `loss`, in which all families count alike.
    """
    return {
        "format": 1,
        "checkpoint": checkpoint,
        "tasks": {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "provenance": provenance(),
        "families": found,
        "accuracy": fmean(family["accuracy"] for family in found.values()),
        "loss": fmean(family["loss"] for family in found.values()),
    }


def table(found: dict[str, dict[str, float]]) -> Table:
    """Accuracy and loss, a row a family."""
    shown = Table("family", "words", "accuracy", "loss", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for family, figures in found.items():
        shown.add_row(family, str(figures["words"]), f"{figures['accuracy']:.1%}", f"{figures['loss']:.3f}")
    return shown
