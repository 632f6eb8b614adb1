import json
from dataclasses import replace

import matplotlib.image
import pytest

from dcformer.models.counts import count_parameters
from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.ablation import MODEL, ROWS, Ablation, ablation, paragraph, rank
from dcformer.studies.runs import describe

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FEW = ("Transformer++", "DCFormer", "windows LG", "differential attention")


def tiny_ablation(**changes):
    train = {"batch_size": 2, "learning_rate": 1e-2, "eval_rows": 4, "eval_every": 4}
    settings = Ablation(rows={name: ROWS[name] for name in FEW}, model=TINY, tokens=120, seeds=2, train=train)
    return replace(settings, **changes)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, ablation(data, tiny_ablation(), folder / "out", folder / "work")


def test_a_whole_ablation(whole):
    folder, report = whole
    assert json.loads((folder / "out/summary.json").read_text()) == report
    assert report["complete"] is True and report["settings"]["tokens"] == 128  # whole steps
    assert {row["row"] for row in report["rows"]} == set(FEW)
    assert [row["loss"]["mean"] for row in report["rows"]] == sorted(row["loss"]["mean"] for row in report["rows"])
    for row in report["rows"]:
        runs = [run for run in report["runs"] if run["row"] == row["row"]]
        assert [run["seed"] for run in runs] == [0, 1] and row["loss"]["count"] == 2
        assert row["loss"]["mean"] == pytest.approx(sum(run["loss"] for run in runs) / 2)
        assert {run["tokens"] for run in runs} == {128}
        assert row["step_seconds"] == json.loads((folder / "out/times.json").read_text())["seconds"][row["row"]] > 0
        assert {run["parameters"] for run in runs} == {row["parameters"]}
        assert {run["flops"] for run in runs} == {128 * row["flops_per_token"]}
    assert matplotlib.image.imread(folder / "out/ablation.png").std() > 0.01
    text = (folder / "out/paragraph.md").read_text()
    assert text == paragraph(report) + "\n"
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][1:] == [
        f"| {row['row']}" for row in report["rows"]
    ]


def test_done_runs_are_taken_as_they_are(whole, data, tmp_path):
    folder, report = whole
    assert ablation(data, tiny_ablation(), folder / "out", tmp_path / "work") == report
    assert not (tmp_path / "work").exists()


def test_rows_are_ranked_and_diverged_ones_last():
    def run(row, loss):
        return {"row": row, "error": None if loss else "at step 3", "loss": loss}

    models = {name: {"parameters": 10, "flops_per_token": 20, "step_seconds": ord(name)} for name in "abc"}
    rows = rank([run("c", None), run("a", 3.0), run("b", 2.5), run("b", 2.7), run("a", None)], models)
    assert [row["row"] for row in rows] == ["b", "a", "c"]
    assert [row["step_seconds"] for row in rows] == [98, 97, 99]
    assert [row["diverged"] for row in rows] == [0, 1, 1] and rows[2]["loss"]["mean"] is None


def test_rows_of_the_papers_table():
    configs = {name: kind(**MODEL, **changes, sliding_window=32) for name, (kind, changes) in ROWS.items()}
    parameters = {name: describe(config, 256)["parameters"] for name, config in configs.items()}
    windows = {name: config.layer_types.count("sliding_attention") for name, config in configs.items()}
    assert all(c.num_hidden_layers == 8 and c.hidden_size == 128 for c in configs.values())
    assert (windows["windows LG"], windows["windows LGLL"], windows["windows LGL6"]) == (4, 6, 7)
    assert parameters["Transformer++"] < parameters["static only (talking heads)"] < parameters["query-wise only"]
    assert parameters["query-wise only"] == parameters["key-wise only"] == parameters["pre only"] == parameters["post only"]
    assert parameters["rank 1"] < parameters["DCFormer"] < parameters["rank 4"]
    assert parameters["2 groups"] < parameters["DCFormer"] and parameters["without gates"] < parameters["DCFormer"]
    plain = count_parameters(DCFormerConfig(**MODEL, compose=None)).total
    assert parameters["Transformer++"] == parameters["Transformer++, windows LGLL"] == plain


@pytest.mark.parametrize(
    ("change", "message"), [({"tokens": 0}, "tokens=0"), ({"seeds": 0}, "seeds=0"), ({"rows": {}}, "rows={}")]
)
def test_bad_input(data, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        ablation(data, tiny_ablation(**change), tmp_path / "out", tmp_path / "work")
