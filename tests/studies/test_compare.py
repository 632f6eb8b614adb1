import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console

from dcformer.models.counts import count_parameters
from dcformer.models.dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.studies.compare import PRESETS, baseline, compare
from dcformer.studies.provenance import provenance
from dcformer.training import TrainSettings


def tiny_config(**changes):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return DCFormerConfig(**{**shape, **changes})


def tiny_settings(out, **changes):
    return TrainSettings(out=str(out), **{"steps": 6, "batch_size": 2, "eval_every": 2, "eval_rows": 4, **changes})


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A comparison with two seeds: its folder, its report, what it showed."""
    out, shown = tmp_path_factory.mktemp("whole") / "out", io.StringIO()
    return out, compare(tiny_config(), data, tiny_settings(out), seeds=2, console=Console(file=shown)), shown.getvalue()


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of its folder, to do as one likes with."""
    return Path(shutil.copytree(whole[0], tmp_path / "copied"))


def losses(report):
    return {run["folder"]: [e["loss"] for e in run["evaluations"]] for run in report["runs"]}


def strict_json(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("size", ["1M", "3M", "10M", "25M", "405M", "1.4B", "6.9B"])
def test_the_baseline_has_as_many_parameters(size):
    config = DCFormerConfig.from_size(size)
    plain = baseline(config)
    assert plain.compose is None and config.compose is not None
    ours, theirs = count_parameters(config).total, count_parameters(plain).total
    unit = 3 * config.hidden_size * config.num_hidden_layers
    assert abs(ours - theirs) <= unit / 2
    assert abs(ours - theirs) <= 1e-3 * ours
    assert plain.intermediate_size > config.intermediate_size


@pytest.mark.parametrize("changes", [{}, {"compose": {"rank": 0}}, {"num_key_value_heads": 2, "qk_norm": True}])
def test_the_baseline_counted_on_the_models_themselves(changes):
    config = tiny_config(vocab_size=300, **changes)
    plain = baseline(config)
    with torch.device("meta"):
        ours, theirs = (sum(p.numel() for p in DCFormerForCausalLM(c).parameters()) for c in (config, plain))
    assert abs(ours - theirs) <= 3 * 16 * 2 / 2


def test_equal_shape_takes_only_the_composition_away():
    config = tiny_config(vocab_size=300)
    plain = baseline(config, "shape")
    assert {**config.to_dict(), "compose": None} == plain.to_dict()
    with pytest.raises(ValueError, match=r"equal='size' is unknown; choose \"parameters\" or \"shape\""):
        baseline(config, "size")


def test_a_whole_comparison(whole):
    out, report, shown = whole
    assert {path.name for path in out.iterdir()} == {
        *("compare.json", "curves.png", "curves.svg"),
        *("dcformer", "transformer", "dcformer-seed1", "transformer-seed1"),
    }
    assert strict_json(out / "compare.json") == report
    assert report["complete"] is True
    assert report["settings"]["seeds"] == 2 and report["settings"]["equal"] == "parameters"
    assert report["settings"]["train"]["steps"] == 6 and report["settings"]["data"]["block_size"] == 16
    assert report["data"]["train"]["tokens"] > report["data"]["validation"]["tokens"] > 0
    assert report["provenance"]["versions"]["torch"] and report["provenance"]["machine"]["cores"] >= 1
    assert [(run["folder"], run["seed"]) for run in report["runs"]] == [
        ("dcformer", 0), ("transformer", 0), ("dcformer-seed1", 1), ("transformer-seed1", 1),
    ]  # fmt: skip
    for run in report["runs"]:
        assert run["error"] is None and run["tokens_per_second"] > 0 and run["seconds"] > 0
        assert [e["step"] for e in run["evaluations"]] == [2, 4, 6]
        assert [e["tokens"] for e in run["evaluations"]] == [64, 128, 192]
        assert all(math.isfinite(e[name]) for e in run["evaluations"] for name in ("loss", "perplexity", "bits_per_byte"))
        assert (out / run["folder"] / "model.safetensors").exists()
        assert f"{run['folder']}: step 6/6" in shown
    assert report["models"]["dcformer"]["flops_per_token"] > report["models"]["transformer"]["flops_per_token"]
    final = {run["folder"]: run["evaluations"][-1]["loss"] for run in report["runs"]}
    differences = [final[f"dcformer{s}"] - final[f"transformer{s}"] for s in ("", "-seed1")]
    assert report["difference"]["mean"] == pytest.approx(sum(differences) / 2)
    assert matplotlib.image.imread(out / "curves.png").std() > 0.01
    assert xml.etree.ElementTree.parse(out / "curves.svg").getroot().tag.endswith("svg")


def test_finished_runs_are_not_run_again_and_seeds_can_be_added(data, whole, copied):
    for folder in copied.glob("*-seed1"):
        shutil.rmtree(folder)
    written = {path: path.stat().st_mtime_ns for path in copied.glob("*/*") if path.is_file()}
    stored = strict_json(copied / "compare.json")
    for run in stored["runs"]:
        run["provenance"] = {"machine": "another one"}
    (copied / "compare.json").write_text(json.dumps(stored))

    report = compare(tiny_config(), data, tiny_settings(copied), seeds=2)
    assert losses(report) == losses(whole[1])
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert [run["provenance"] for run in report["runs"][:2]] == [{"machine": "another one"}] * 2
    assert [run["provenance"] for run in report["runs"][2:]] == [report["provenance"]] * 2
    assert report["provenance"] == provenance()
    assert report["complete"] is True and report["difference"]["count"] == 2


_KILLED = """
import os, signal
from test_compare import compare, tiny_config, tiny_settings
from dcformer.training import DataSettings
from dcformer.training.metrics import MetricsCallback

write = MetricsCallback._write

def write_or_die(self, line, state):
    write(self, line, state)
    if self.path.parent.name == "transformer" and line["step"] == 5:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsCallback._write = write_or_die
compare(tiny_config(), {data!r}, tiny_settings({out!r}))
"""


def test_a_killed_comparison_goes_on_and_ends_the_same(data, whole, tmp_path):
    here = str(Path(__file__).parent)
    script = _KILLED.format(data=data, out=str(tmp_path / "killed"))
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": here})
    assert killed.returncode == -signal.SIGKILL
    partial = strict_json(tmp_path / "killed" / "compare.json")
    assert partial["complete"] is False and [run["folder"] for run in partial["runs"]] == ["dcformer"]
    assert not (tmp_path / "killed" / "transformer" / "result.json").exists()
    assert any((tmp_path / "killed" / "transformer").glob("checkpoint-*"))

    finished = (tmp_path / "killed" / "dcformer" / "result.json").stat().st_mtime_ns
    resumed = compare(tiny_config(), data, tiny_settings(tmp_path / "killed"))
    assert (tmp_path / "killed" / "dcformer" / "result.json").stat().st_mtime_ns == finished
    undisturbed = losses(whole[1])
    assert losses(resumed) == {folder: undisturbed[folder] for folder in ("dcformer", "transformer")}


def test_diverged_runs_are_listed(data, tmp_path):
    report = compare(tiny_config(), data, tiny_settings(tmp_path, learning_rate=1e30, warmup_steps=1, max_grad_norm=1e30))
    assert [run["folder"] for run in report["runs"] if run["error"]] == ["dcformer", "transformer"]
    assert all("step" in run["error"] for run in report["runs"])
    assert report["difference"]["mean"] is None
    assert "DCFormer with seed 0 diverged" in report["verdict"] and "no verdict" in report["verdict"]
    assert strict_json(tmp_path / "compare.json") == report
    assert (tmp_path / "curves.png").exists()


def test_bad_input(data, tmp_path):
    with pytest.raises(ValueError, match=r"seeds=0 must be at least 1"):
        compare(tiny_config(), data, tiny_settings(tmp_path), seeds=0)
    with pytest.raises(ValueError, match=r"config\.compose=None is a plain Transformer"):
        compare(tiny_config(compose=None), data, tiny_settings(tmp_path))
    (tmp_path / "compare.json").write_text("[]")
    with pytest.raises(ValueError, match=r"compare\.json is no report of a comparison"):
        compare(tiny_config(), data, tiny_settings(tmp_path))
    assert (tmp_path / "compare.json").read_text() == "[]"


def test_a_comparison_with_other_settings_is_not_mixed_in(data, copied):
    before = (copied / "compare.json").read_text()
    with pytest.raises(ValueError, match="learning_rate"):
        compare(tiny_config(), data, tiny_settings(copied, learning_rate=0.5))
    assert (copied / "compare.json").read_text() == before


def test_a_full_disk_leaves_nothing_half_written(data, copied, monkeypatch):
    before = (copied / "curves.png").read_bytes()

    def full(self, path, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match=r"could not write the plot .*No space left on device"):
        compare(tiny_config(), data, tiny_settings(copied), seeds=2)
    assert (copied / "curves.png").read_bytes() == before
    assert not list(copied.glob("*.part"))
    assert strict_json(copied / "compare.json")["complete"] is True


def test_the_demo_preset_is_a_small_dcformer():
    preset = PRESETS["demo"]
    config = DCFormerConfig(vocab_size=preset.data.vocab_size, **preset.model)
    assert 1e6 < count_parameters(config).total < 4e6
    assert replace(TrainSettings(out="x", **preset.train), out="y").steps >= 10
