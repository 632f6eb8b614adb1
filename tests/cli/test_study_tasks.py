import json
from pathlib import Path

import pytest
from tiny_models import write_checkpoint

from dcformer.studies.synthetic import SPLITS, summarize

TASKS = [
    {"task_id": "first", "texts": "\nalpha beta => [ gamma ]\nalpha zeta => [ eta theta ]\n"},
    {"task_id": "second", "texts": "\nkappa iota => [ alpha ]\n"},
]


@pytest.mark.parametrize("kind", ["dcformer", "llama"])
def test_brackets(call, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model", kind)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TASKS))
    code, out, err = call("study", "brackets", "model", "tasks.jsonl", "--out", "new/figures.json")
    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert {family: figures["words"] for family, figures in report["families"].items()} == {"first": 2, "second": 1}
    assert f"accuracy {report['accuracy']:.1%}, {report['loss']:.3f} nats a word" in out and "first" in out
    assert report["checkpoint"] == "model"


def test_brackets_of_nothing(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("no JSON\n")
    for arguments, message in (
        (("model", "missing.jsonl"), "missing.jsonl is no file"),
        (("model", "tasks.jsonl"), "tasks.jsonl, line 1, must be such as"),
    ):
        code, out, err = call("study", "brackets", *arguments, "--out", "figures.json")
        assert (code, out) == (1, "") and message in err and err.count("\n") == 1


def test_synthetic(call, monkeypatch):
    """The options reach the study, and its words the user."""
    asked = []

    def study(settings, out, work, console):
        asked.append((settings, out, work))
        runs = []
        return {"settings": vars(settings), "accuracy": summarize(runs), "runs": runs, "complete": False}

    monkeypatch.setattr("dcformer.studies.synthetic.synthetic", study)
    code, out, err = call(
        "study", "synthetic", "--out", "there", "--tokens", "1000000", "--seeds", "2", "--lr", "0.1", "--bf16"
    )
    assert (code, err) == (0, "")
    ((settings, folder, work),) = asked
    assert (folder, work) == (Path("there"), Path("runs/synthetic"))
    assert (settings.tokens, settings.seeds, settings.train["learning_rate"], settings.train["bf16"]) == (
        1_000_000,
        2,
        0.1,
        True,
    )
    assert "1.0 M tokens" in out and "2 seeds" in out and "The study is not complete." in out
    assert all(what in out for what in SPLITS.values()) and "there/summary.json" in out
