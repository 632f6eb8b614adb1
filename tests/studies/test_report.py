import io
import math
import random

import numpy as np
import pytest
from rich.console import Console

from dcformer.studies.report import first_step_at, spread, summarize, table

FLOPS = {"dcformer": 1.1, "transformer": 1.0}


def curve(losses, every=100):
    return [{"step": (i + 1) * every, "loss": loss} for i, loss in enumerate(losses)]


def run(model, losses, seed=0, error=None, speed=1000.0):
    return {"model": model, "seed": seed, "error": error, "evaluations": curve(losses), "tokens_per_second": speed}


def pair(ours, theirs, seed=0):
    return [run("dcformer", ours, seed, speed=500.0), run("transformer", theirs, seed)]


@pytest.mark.parametrize(
    ("loss", "step"),
    [
        (4.0, 200),  # exactly at an evaluation
        (4.5, 150),
        (3.9, 220),
        (5.0, 100),
        (6.0, 100),  # already there at the first evaluation
        (3.5, 300),
        (3.4999, None),
        (math.nan, None),
    ],
)
def test_first_step_at_known_answers(loss, step):
    found = first_step_at(curve([5.0, 4.0, 3.5]), loss)
    assert found == (step if step is None else pytest.approx(step))


def test_a_curve_that_rises_again_counts_from_its_first_visit():
    assert first_step_at(curve([5.0, 4.0, 4.6, 3.0]), 4.5) == pytest.approx(150)


def test_first_step_at_no_evaluations():
    assert first_step_at([], 4.0) is None


def test_first_step_at_inverts_any_falling_curve(seed):
    draw = random.Random(seed)
    losses = sorted((draw.uniform(1, 9) for _ in range(12)), reverse=True)
    steps = [(i + 1) * 100 for i in range(12)]
    step = draw.uniform(100, 1200)
    assert first_step_at(curve(losses), float(np.interp(step, steps, losses))) == pytest.approx(step)


def test_spread():
    assert spread([]) == {"mean": None, "sd": None, "min": None, "max": None, "count": 0}
    assert spread([2.0]) == {"mean": 2.0, "sd": None, "min": 2.0, "max": 2.0, "count": 1}
    assert spread([1.0, 3.0]) == {"mean": 2.0, "sd": pytest.approx(math.sqrt(2)), "min": 1.0, "max": 3.0, "count": 2}


def test_a_better_dcformer():
    summary = summarize(pair([5.0, 4.0, 3.5], [5.2, 4.4, 4.0]), FLOPS)
    assert summary["difference"]["mean"] == pytest.approx(-0.5)
    saved = summary["saved"]
    assert saved["model"] == "dcformer"
    assert saved["by_seed"][0]["step"] == pytest.approx(200)
    assert saved["steps"] == pytest.approx(1 / 3)
    assert saved["flops"] == pytest.approx(1 - 2 / 3 * 1.1)
    assert saved["time"] == pytest.approx(1 - 2 / 3 * 2)  # at half the speed
    assert "0.5000 below the Transformer" in summary["verdict"]
    assert "3.5000 against 4.0000 (one seed)" in summary["verdict"]
    assert "33.3% fewer steps, 26.7% fewer FLOPs, 33.3% more time" in summary["verdict"]


def test_a_worse_dcformer_is_called_worse():
    summary = summarize(pair([5.2, 4.4, 4.0], [5.0, 4.0, 3.5]), FLOPS)
    assert summary["difference"]["mean"] == pytest.approx(0.5)
    assert summary["saved"]["model"] == "transformer"
    assert summary["saved"]["flops"] == pytest.approx(1 - 2 / 3 / 1.1)
    assert "0.5000 above the Transformer" in summary["verdict"]
    assert "The Transformer reaches the DCFormer's final loss" in summary["verdict"]


def test_equal_models():
    summary = summarize(pair([5.0, 4.0], [5.0, 4.0]), FLOPS)
    assert "level with the Transformer" in summary["verdict"]
    assert "fewer" not in summary["verdict"]


def test_several_seeds():
    runs = pair([5.0, 3.9], [5.0, 4.0]) + pair([5.0, 3.7], [5.0, 4.0], seed=1) + pair([5.0, 3.8], [5.0, 4.0], seed=2)
    summary = summarize(runs, FLOPS)
    assert summary["difference"]["mean"] == pytest.approx(-0.2)
    assert summary["difference"]["sd"] == pytest.approx(0.1)
    assert [each["loss"] for each in summary["difference"]["by_seed"]] == pytest.approx([-0.1, -0.3, -0.2])
    shares = [(100 + 100 * 1 / fall) / 200 for fall in (1.1, 1.3, 1.2)]
    assert summary["saved"]["steps"] == pytest.approx(1 - sum(shares) / 3)
    assert "mean of 3 seeds, standard deviation of the difference 0.1000" in summary["verdict"]
    assert "within its spread" not in summary["verdict"]


def test_a_difference_within_its_spread_and_a_loss_that_one_seed_never_reaches():
    summary = summarize(pair([5.0, 3.5], [5.0, 4.0]) + pair([5.0, 4.2], [5.0, 4.0], seed=1), FLOPS)
    assert summary["difference"]["mean"] == pytest.approx(-0.15)
    assert summary["saved"]["by_seed"][1]["step"] is None
    assert summary["saved"]["by_seed"][1]["flops"] is None
    assert summary["saved"]["steps"] is None
    assert "within its spread over seeds" in summary["verdict"]
    assert "The DCFormer reaches the Transformer's final loss with 1 of 2 seeds." in summary["verdict"]


def test_diverged_runs_are_named_and_their_seeds_left_out():
    runs = pair([5.0, 3.0], [5.0, 4.0])
    runs += [run("dcformer", [5.0], 1, error="loss is nan at step 7"), run("transformer", [5.0, 4.0], 1)]
    summary = summarize(runs, FLOPS)
    assert summary["difference"]["count"] == 1
    assert summary["difference"]["mean"] == pytest.approx(-1.0)
    assert "DCFormer with seed 1 diverged: loss is nan at step 7" in summary["verdict"]


def test_no_pair_no_verdict():
    runs = [run("dcformer", [5.0], error="loss is nan at step 7"), run("transformer", [5.0, 4.0])]
    summary = summarize(runs, FLOPS)
    assert summary["difference"]["mean"] is None
    assert summary["saved"] == {"model": None, "by_seed": [], "steps": None, "flops": None, "time": None}
    assert summary["verdict"].endswith("No seed finished with both models: no verdict.")
    assert summarize([], FLOPS)["verdict"] == "No seed finished with both models: no verdict."


def test_the_table_has_all_runs_in_80_columns():
    runs = [*pair([5.0, 3.0], [5.0, 4.0]), run("dcformer", [], 1, error="diverged at step 1", speed=None)]
    for each in runs:
        each["evaluations"] = [e | {"perplexity": 123456.78, "bits_per_byte": 1.2345} for e in each["evaluations"]]
    models = {name: {"parameters": 6_888_123_456, "flops_per_token": 4.1e10} for name in FLOPS}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table({"runs": runs, "models": models}))
    text = console.export_text()
    assert "…" not in text
    assert text.count("DCFormer") == 2 and text.count("Transformer") == 1 and text.count("diverged") == 1
    assert "123456.78" in text and "6,888.12 M" in text
