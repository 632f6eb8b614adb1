import json

import matplotlib.image
import pytest
from tiny_models import tokenizer, write_checkpoint

TEXT = " ".join(["alpha beta gamma delta epsilon zeta"] * 40)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"{number} {TEXT}\n")
    return tmp_path


def strict_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


ANALYZE = ("--data", "text", "--block-size", "32", "--rows", "3")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dcformer", {"compose": {"static": True}}),
        ("dcpythia", {"window_pattern": "LG", "sliding_window": 4}),
        ("dcformer", {"compose": None}),
        ("dcformer", {"compose": {"post": False}, "num_attention_heads": 1}),
    ],
)
def test_analyze(call, place, kind, changes):
    write_checkpoint(place / "model", kind, **changes)
    code, out, err = call("analyze", "model", "--out", "new/analysis", *ANALYZE)
    assert (code, err) == (0, "")
    assert "effective rank" in out and "new/analysis/analysis.json" in out
    composed, heads = changes.get("compose", {}) is not None, changes.get("num_attention_heads", 4)
    names = {"layers", "similarity"} | ({"tokens"} if composed else set())
    folder = place / "new" / "analysis"
    assert {path.name for path in folder.iterdir()} == {"analysis.json"} | {f"{n}.{k}" for n in names for k in ("png", "svg")}
    assert matplotlib.image.imread(folder / "layers.png").std() > 0
    report = strict_json(folder / "analysis.json")
    assert report["checkpoint"] == "model" and report["settings"]["rows"] == 3
    assert report["provenance"]["versions"]["torch"] and report["model"]["config"]["hidden_size"] == 32
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    assert [layer["window"] for layer in report["layers"]] == ([4, None] if "window_pattern" in changes else [None, None])
    for layer in report["layers"]:
        assert len(layer["similarity"]["composed"]["matrix"]) == len(layer["entropy"]["raw"]) == heads
        if composed:
            options = report["model"]["config"]["compose"]
            parts = {"dynamic", "query", "query_gate", "key", "key_gate"} | ({"static"} if options["static"] else set())
            sides = {"scores", "weights"} if options["post"] else {"scores"}
            assert set(layer["variance"]) == set(layer["mixing"]) == sides
            assert all(set(shares) == parts for shares in layer["variance"].values())
            assert layer["mixing"]["scores"]["key"]["norm"]["tokens"]
        else:
            assert layer["variance"] is None and layer["mixing"] is None
            assert layer["similarity"]["raw"] == layer["similarity"]["composed"]


def test_explain(call, place):
    write_checkpoint(place / "model")
    code, out, err = call("explain", "model", "alpha <b>beta", "--out", "new/page.html")
    assert (code, out, err) == (0, "Open new/page.html in a browser.\n", "")
    page = (place / "new" / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<b>" not in page and "Attention heads of model" in page
    assert [path.name for path in (place / "new").iterdir()] == ["page.html"]


def test_what_cannot_be_looked_into(call, place):
    write_checkpoint(place / "llama", "llama")
    write_checkpoint(place / "model")
    write_checkpoint(place / "small", vocab_size=len(tokenizer) - 200)
    (place / "full").mkdir()
    (place / "full" / "file").write_text("")
    other = "dcformer: the checkpoint is a LlamaForCausalLM; only the heads of DCFormer and DCPythia"
    for arguments, message in (
        (("analyze", "llama", "--out", "new"), other),
        (("explain", "llama", "alpha"), other),
        (("analyze", "model", "--out", "full"), "dcformer: out='full' is there already; a new or empty folder would do"),
        (
            ("analyze", "model", "--out", "new", "--data", "text", "--block-size", "8"),
            "dcformer: block_size=8 must be at least 16",
        ),
        (("analyze", "nothing", "--out", "new"), "dcformer: nothing is no checkpoint"),
        (("explain", "model", ""), "dcformer: text has 0 tokens"),
        (("explain", "small", "alpha beta"), "is not in the model's vocabulary"),
    ):
        code, out, err = call(*arguments)
        assert code == 1 and out == "" and message in err and err.count("\n") == 1
    assert not (place / "new").exists() and not (place / "explain.html").exists()


def test_analyze_that_fails_leaves_nothing(call, place, monkeypatch):
    write_checkpoint(place / "model")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dcformer.studies.analyze.plot_analysis", full)
    code, _, err = call("analyze", "model", "--out", "analysis", *ANALYZE)
    assert code == 1 and "could not write the analysis" in err
    assert not [path for path in place.iterdir() if "analysis" in path.name]
