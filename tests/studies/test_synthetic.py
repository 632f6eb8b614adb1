import json
import shutil
from functools import partial

import matplotlib.image
import pytest

from dcformer.studies.synthetic import Synthetic, _prepare, paragraph, summarize, synthetic
from dcformer.studies.tasks import families
from dcformer.training import DataSettings

TINY = Synthetic(
    model={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    texts=160,
    evaluated=1,
    tokens=4 * 2 * 512,
    vocab_size=600,
    block_size=512,
    train={"batch_size": 2, "learning_rate": 1e-3, "eval_rows": 4},
)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Tokenized texts go to a folder of the test, and the compiled kernel stays where it is."""
    with pytest.MonkeyPatch.context() as patch:
        settings = partial(DataSettings, cache_dir=str(tmp_path_factory.mktemp("cache")))
        patch.setattr("dcformer.studies.synthetic.DataSettings", settings)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, synthetic(TINY, folder / "out", folder / "work")


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole[0], tmp_path / "copied")


def without_origin(report):
    runs = [
        {name: value for name, value in run.items() if name not in ("seconds", "tokens_per_second")} for run in report["runs"]
    ]
    return {**report, "runs": runs, "provenance": None}


def test_a_whole_study(whole):
    folder, report = whole
    out = folder / "out"
    assert json.loads((out / "summary.json").read_text()) == report
    assert report["study"] == "synthetic" and report["complete"] and report["settings"]["tokens"] == 4096
    assert matplotlib.image.imread(out / "synthetic.png").std() > 0 and (out / "synthetic.svg").exists()
    assert [run["model"] for run in report["runs"]] == ["dcformer", "transformer"]
    assert report["models"]["transformer"]["config"]["compose"] is None
    for run in report["runs"]:
        assert (out / "runs" / run["file"]).exists() and (out / "accuracy" / run["file"]).exists()
        for split in ("seen", "unseen"):
            assert list(run["accuracy"][split]) == list(families())
            assert all(figures["words"] == 6 and figures["loss"] > 0 for figures in run["accuracy"][split].values())
    text = (out / "paragraph.md").read_text()
    assert text == paragraph(report) + "\n" and text.startswith(f"{len(families())} families of tasks")


def test_labels_are_the_answers(tmp_path):
    """Wherever a row is cut, the last word of each line that ends in it is learned and no more."""
    prepared = _prepare(TINY, tmp_path)
    for split in (prepared.train, prepared.validation):
        for ids, labels in zip(split["input_ids"], split["labels"], strict=True):
            assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
            *ended, _ = prepared.tokenizer.decode(ids, skip_special_tokens=True).split("\n")
            answers = [line.split(" ")[-1] for line in ended]
            assert prepared.tokenizer.decode([label for label in labels if label != -100]).replace(" ", "") == "".join(answers)


def test_runs_with_other_labels_are_other_runs(tmp_path, monkeypatch):
    before = _prepare(TINY, tmp_path).summary["fingerprint"]
    assert _prepare(TINY, tmp_path).summary["fingerprint"] == before
    monkeypatch.setattr("dcformer.studies.synthetic._answers", lambda rows, begins, ends: {"labels": rows["input_ids"]})
    assert _prepare(TINY, tmp_path).summary["fingerprint"] != before


def test_a_study_that_is_done_is_not_done_again(copied, whole, monkeypatch):
    shutil.rmtree(copied / "work")
    monkeypatch.setattr("dcformer.studies.runs.train", None)
    monkeypatch.setattr("dcformer.studies.synthetic.bracket_accuracy", None)
    again = synthetic(TINY, copied / "out", copied / "work")
    assert without_origin(again) == without_origin(whole[1])


def test_a_killed_study_goes_on(whole, tmp_path, monkeypatch):
    """It dies as the second model is evaluated; what was there is not done again."""
    calls = []

    def die(*arguments, **options):
        calls.append(arguments)
        if len(calls) > 2:  # two splits of the first model
            raise KeyboardInterrupt
        return real(*arguments, **options)

    from dcformer.studies.brackets import bracket_accuracy as real

    monkeypatch.setattr("dcformer.studies.synthetic.bracket_accuracy", die)
    with pytest.raises(KeyboardInterrupt):
        synthetic(TINY, tmp_path / "out", tmp_path / "work")
    halfway = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert not halfway["complete"] and len(halfway["runs"]) == 1
    assert "The study is not complete." in (tmp_path / "out" / "paragraph.md").read_text()
    monkeypatch.setattr("dcformer.studies.synthetic.bracket_accuracy", real)
    monkeypatch.setattr("dcformer.studies.runs.train", None)  # both are trained
    assert without_origin(synthetic(TINY, tmp_path / "out", tmp_path / "work")) == without_origin(whole[1])


def test_a_model_that_is_gone_before_it_was_evaluated_is_named(copied):
    shutil.rmtree(copied / "work")
    shutil.rmtree(copied / "out" / "accuracy")
    with pytest.raises(ValueError, match=r"is gone, with a model that is not evaluated; remove .*runs.*jsonl to train it"):
        synthetic(TINY, copied / "out", copied / "work")


def test_means_count_finished_runs_only():
    def run(model, accuracy):
        each = accuracy and {"a: x": {"accuracy": accuracy}, "b: y": {"accuracy": accuracy / 2}}
        error = None if accuracy else "diverged"
        return {
            "model": model,
            "name": f"{model}-{accuracy}",
            "error": error,
            "accuracy": each and {"seen": each, "unseen": each},
        }

    runs = [run("dcformer", 0.8), run("dcformer", 0.4), run("dcformer", None), run("transformer", None)]
    found = summarize(runs)
    assert found["seen"]["dcformer"]["families"] == pytest.approx({"a: x": 0.6, "b: y": 0.3})
    assert found["unseen"]["dcformer"]["mean"] == pytest.approx(0.45)
    assert found["seen"]["transformer"] == {"mean": None, "families": {}}
    settings = {"tokens": 1e6, "seeds": 3, "model": {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}}
    text = paragraph({"settings": settings, "accuracy": found, "runs": runs, "complete": True})
    assert "| ... b | 30.0% |  |" in text and "Diverged: dcformer-None, transformer-None." in text


@pytest.mark.parametrize("name", ["texts", "evaluated", "tokens", "seeds"])
def test_settings_out_of_range(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        synthetic(Synthetic(**{name: 0}), tmp_path / "out", tmp_path / "work")
