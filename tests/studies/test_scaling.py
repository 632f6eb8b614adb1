import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dcformer.models.counts import count_flops, count_parameters
from dcformer.models.dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.studies.report import NAMES
from dcformer.studies.scaling import RUNGS, Ladder, paragraph, scaling, summarize

SHAPE = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "tie_word_embeddings": True}


def tiny_ladder(**changes):
    rungs = {"small": {"hidden_size": 8} | SHAPE, "large": {"hidden_size": 16} | SHAPE}
    train = {"batch_size": 2, "eval_rows": 4, "eval_every": 2, "save_every": 2}
    ladder = Ladder(rungs=rungs, tokens_per_parameter=0.1, rates=(1e-3, 1e-2), tuned=1, seeds=2, train=train)
    return replace(ladder, **changes)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A ladder of two rungs: its folder and its report."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, scaling(data, tiny_ladder(), folder / "out", folder / "work")


def untimed(report):
    """A report without what a clock wrote."""
    report = copy.deepcopy(report)
    for run in report["runs"]:
        del run["tokens_per_second"]
    return report


def test_a_whole_ladder(whole):
    folder, report = whole
    assert json.loads((folder / "out/summary.json").read_text()) == report
    assert report["complete"] is True
    assert report["settings"]["ladder"]["rates"] == [1e-3, 1e-2] and report["settings"]["data"]["block_size"] == 16
    # Both rates with the first seed, and the better one with the second; the larger rung takes the smaller one's.
    tried = {(run["model"], run["rung"], run["learning_rate"], run["seed"]) for run in report["runs"]}
    rates = report["rates"]
    assert tried == {
        (model, rung, rate, seed)
        for model in NAMES
        for rung, rate, seed in [
            ("small", 1e-3, 0),
            ("small", 1e-2, 0),
            ("small", rates[model]["small"], 1),
            ("large", rates[model]["small"], 0),
            ("large", rates[model]["small"], 1),
        ]
    }
    assert len(report["runs"]) == len(tried)
    for model in NAMES:
        loss = {
            r["learning_rate"]: r["loss"] for r in report["runs"] if (r["model"], r["rung"], r["seed"]) == (model, "small", 0)
        }
        assert rates[model] == {"small": min(loss, key=loss.get), "large": min(loss, key=loss.get)}
    for name, rung in report["rungs"].items():
        config = DCFormerConfig(**tiny_ladder().rungs[name], vocab_size=300, compose=None)
        counts = count_parameters(config)
        assert rung["parameters"] == counts.total - counts.embeddings
        assert rung["tokens"] == rung["steps"] * 2 * 16 == pytest.approx(0.1 * rung["parameters"], abs=2 * 16)
        assert rung["models"]["transformer"]["flops_per_token"] == 3 * count_flops(config, 16).total
        assert rung["models"]["dcformer"]["flops_per_token"] > rung["models"]["transformer"]["flops_per_token"]
        assert {run["tokens"] for run in report["runs"] if run["rung"] == name} == {rung["tokens"]}
    assert (
        [each["rung"] for each in report["flops"]["at"]] == ["small", "large"] == [e["rung"] for e in report["seconds"]["at"]]
    )
    assert matplotlib.image.imread(folder / "out/scaling.png").std() > 0.01
    assert xml.etree.ElementTree.parse(folder / "out/scaling.svg").getroot().tag.endswith("svg")
    assert (folder / "out/paragraph.md").read_text() == paragraph(report) + "\n"


def test_records_of_runs_are_all_that_is_needed_later(whole, data, tmp_path):
    folder, report = whole
    out = tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    shutil.copy(folder / "out/times.json", out)
    for run in report["runs"]:
        record = (folder / "out/runs" / run["file"]).read_text()
        head, *lines = map(json.loads, record.splitlines())
        assert head["flops"] == run["flops"] and head["provenance"]["versions"]["torch"]
        assert [line["step"] for line in lines if line["split"] == "train"][-1] * 32 == run["tokens"]
        assert lines[-1]["split"] == "validation" and lines[-1]["loss"] == run["loss"] and lines[-1]["seconds"] > 0
        (out / "runs" / run["file"]).write_text(record)
        of = report["rungs"][run["rung"]]
        assert run["seconds"] == of["steps"] * of["models"][run["model"]]["step_seconds"] > 0
    assert scaling(data, tiny_ladder(), out, tmp_path / "work") == report
    assert not (tmp_path / "work").exists()


_KILLED = """
import os, signal
from pathlib import Path
from test_scaling import scaling, tiny_ladder
from dcformer.training import DataSettings
from dcformer.training.metrics import MetricsCallback

write = MetricsCallback._write

def write_or_die(self, line, state):
    write(self, line, state)
    if self.path.parent.name.startswith("transformer-large") and line["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsCallback._write = write_or_die
scaling({data!r}, tiny_ladder(), Path({out!r}), Path({work!r}))
"""


def test_a_killed_ladder_goes_on_and_ends_with_the_same_summary(whole, data, tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    (out / "runs").mkdir(parents=True)
    shutil.copy(whole[0] / "out/times.json", out)
    for path in (whole[0] / "out/runs").glob("*-small-*"):  # done already, to save the test's time
        shutil.copy(path, out / "runs")
    script = _KILLED.format(data=data, out=str(out), work=str(work))
    killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})
    assert killed.returncode == -signal.SIGKILL
    partial = json.loads((out / "summary.json").read_text())
    assert partial["complete"] is False and "not complete" in (out / "paragraph.md").read_text()
    assert [each["rung"] for each in partial["flops"]["at"]] == []  # one rung makes no law
    assert any(work.glob("transformer-large*/checkpoint-*"))
    written = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}

    resumed = scaling(data, tiny_ladder(), out, work)
    assert untimed(resumed) == untimed(whole[1])
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_diverged_runs_are_listed_and_not_tried_again(data, tmp_path):
    ladder = tiny_ladder(rates=(1e-2, 1e30), seeds=1)
    ladder.train.update(warmup_steps=1, max_grad_norm=1e30)
    report = scaling(data, ladder, tmp_path / "out", tmp_path / "work")
    failed = [run for run in report["runs"] if run["error"]]
    assert [run["model"] for run in failed] == list(NAMES) and all(run["loss"] is None for run in failed)
    assert report["failed"] == [run["name"] for run in failed]
    assert all(set(rates.values()) == {1e-2} for rates in report["rates"].values())
    assert len(report["flops"]["at"]) == 2
    assert "Diverged: dcformer-small-lr1e+30-seed0, transformer-small-lr1e+30-seed0." in paragraph(report)
    assert scaling(data, ladder, tmp_path / "out", tmp_path / "elsewhere") == report
    assert not (tmp_path / "elsewhere").exists()


def test_a_damaged_record_is_named(whole, data, tmp_path):
    report = whole[1]
    path = tmp_path / "out/runs" / report["runs"][0]["file"]
    path.parent.mkdir(parents=True)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match=rf"{path.name} is no record of a run; remove it"):
        scaling(data, tiny_ladder(), tmp_path / "out", tmp_path / "work")


def test_only_its_own_summary_is_replaced(data, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for content in ('{"mine": 1}', '{"study": "ablation", "runs": []}', "[]", "{"):
        (out / "summary.json").write_text(content)
        with pytest.raises(ValueError, match=r"summary.json is no summary of scaling, which would replace it; move it"):
            scaling(data, tiny_ladder(), out, tmp_path / "work")
        assert (out / "summary.json").read_text() == content and len(list(out.iterdir())) == 1
    with pytest.raises(ValueError, match=r"out='.*summary.json' cannot be a folder \(File exists\); choose another"):
        scaling(data, tiny_ladder(), out / "summary.json", tmp_path / "work")


def made_up(multiplier):
    """Runs of five rungs and two seeds: a DCFormer that does with so much compute what the other does with more."""
    draw, runs = np.random.default_rng(0), []
    for place, seed, model in ((p, s, m) for p in range(5) for s in range(2) for m in NAMES):
        flops = 1e13 * 4**place * (1.1 if model == "dcformer" else 1)
        effective = flops * (multiplier if model == "dcformer" else 1)
        loss = (1.8 + 40 * effective**-0.1) * np.exp(draw.normal(0, 1e-4))
        run = {"name": f"{model}{place}{seed}", "rung": f"r{place}", "model": model, "learning_rate": 1e-3, "seed": seed}
        runs.append({**run, "error": None, "loss": loss, "flops": flops, "seconds": flops / 1e10})
    return runs, {model: {f"r{place}": 1e-3 for place in range(5)} for model in NAMES}


def test_a_made_up_ladder_gives_its_multiplier_in_flops_and_seconds():
    runs, rates = made_up(1.7)
    found = summarize(runs, rates)
    for cost in ("flops", "seconds"):
        assert [each["rung"] for each in found[cost]["at"]] == [f"r{place}" for place in range(5)]
        for each in found[cost]["at"]:
            assert each["multiplier"] == pytest.approx(1.7, rel=0.02)
            assert each["low"] < each["multiplier"] < each["high"]
    assert found["losses"]["r0"]["dcformer"]["count"] == 2


def test_only_rungs_that_both_models_finished_count_and_only_at_the_chosen_rate():
    runs, rates = made_up(1.7)
    for run in runs:
        if run["rung"] == "r4" and run["model"] == "transformer":
            run |= {"error": "diverged", "loss": None}
    runs.append({**runs[0], "learning_rate": 2e-3, "loss": 0.1})
    found = summarize(runs, rates)
    assert list(found["losses"]) == ["r0", "r1", "r2", "r3"]
    assert found["failed"] == ["transformer40", "transformer41"]
    assert found["at_edge"] == ["DCFormer at r0: 0.001"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 0}, "seeds=0"),
        ({"tuned": 0}, "tuned=0"),
        ({"tokens_per_parameter": 0}, "tokens_per_parameter=0"),
        ({"rates": ()}, r"rates=\(\)"),
        ({"rates": (-1.0,)}, r"rates=\(-1.0,\)"),
        ({"rungs": {}}, "rungs={}"),
    ],
)
def test_bad_input(data, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        scaling(data, tiny_ladder(**change), tmp_path / "out", tmp_path / "work")


def test_rungs_have_the_sizes_that_they_are_named_after():
    for name, shape in RUNGS.items():
        counts = count_parameters(DCFormerConfig(**shape, compose=None))
        assert (counts.total - counts.embeddings) / 1e6 == pytest.approx(float(name[:-1]), rel=0.12)


def test_flops_of_training_are_those_that_torch_counts_on_the_reference():
    """To the FLOP, but for two things: torch multiplies pairs that no query sees too, and does not count the gates' product."""
    config = DCFormerConfig(**RUNGS["0.4M"], vocab_size=50)
    model, length = DCFormerForCausalLM(config), 12
    model.set_attn_implementation("dc_reference")
    ids = torch.randint(50, (1, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    seen, unseen = sum(range(1, length + 1)), sum(range(length))
    N, D, R, sides_and_parts = config.num_attention_heads, config.head_dim, 2, 4
    products = 4 * N * D + sides_and_parts * 4 * R * N
    besides = config.num_hidden_layers * (unseen * products - seen * sides_and_parts * 2 * N)
    assert counter.get_total_flops() == 3 * (count_flops(config, length).total * length + besides)
