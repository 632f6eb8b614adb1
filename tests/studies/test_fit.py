import json

import numpy as np
import pytest

from dcformer.studies.fit import multipliers

COSTS = 10 ** np.linspace(13, 15.5, 5)


def laws(draw, costs, multiplier, floor=None):
    """Points of two models of which ours does with a cost what the other does with `multiplier` times as much."""
    floor = draw.uniform(0.5, 2.5) if floor is None else floor
    exponent = draw.uniform(0.06, 0.2)
    scale = draw.uniform(1, 4) * costs[0] ** exponent

    def loss(cost):
        return floor + scale * cost**-exponent

    return {"ours": (costs, loss(multiplier * costs)), "theirs": (costs * 0.9, loss(costs * 0.9))}


def noisy(draw, points, sd):
    return {model: (cost, loss * np.exp(draw.normal(0, sd, len(loss)))) for model, (cost, loss) in points.items()}


def test_a_known_multiplier_of_power_laws_with_a_floor_is_found(seed):
    """Nearly, as these are no parabolas: of 20 thousand draws the worst is 3.5 % off, half are within 0.07 %."""
    draw = np.random.default_rng(seed)
    multiplier = draw.uniform(0.6, 2.5)
    found = multipliers(laws(draw, COSTS, multiplier), "ours", "theirs", COSTS)
    assert [each["multiplier"] for each in found["at"]] == pytest.approx([multiplier] * 5, rel=0.04)
    assert [each["cost"] for each in found["at"]] == list(COSTS)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_known_multiplier_is_found_where_losses_fall_faster_and_faster(seed):
    draw = np.random.default_rng(seed)
    multiplier, bend = draw.uniform(0.6, 2.5), draw.uniform(0.01, 0.05)

    def loss(cost):
        x = np.log(cost / COSTS[0])
        return 3.6 * np.exp(-0.05 * x - bend * x**2)

    points = {"ours": (COSTS[:3], loss(multiplier * COSTS[:3])), "theirs": (COSTS[:3], loss(COSTS[:3]))}
    found = multipliers(points, "ours", "theirs", COSTS[:3])
    assert [each["multiplier"] for each in found["at"]] == pytest.approx([multiplier] * 3)
    for model, (cost, losses) in points.items():
        assert np.exp(np.polyval(found["curves"][model][::-1], np.log(cost))) == pytest.approx(losses)


def test_two_sizes_are_joined_by_power_laws(seed):
    draw = np.random.default_rng(seed)
    multiplier = draw.uniform(0.6, 2.5)
    found = multipliers(laws(draw, COSTS[:2], multiplier, floor=0), "ours", "theirs", COSTS[:2])
    assert [each["multiplier"] for each in found["at"]] == pytest.approx([multiplier] * 2)
    assert [curve[2] for curve in found["curves"].values()] == [0, 0]
    assert [(each["low"], each["high"]) for each in found["at"]] == [(None, None)] * 2  # nothing is left to judge the fit by


@pytest.mark.parametrize(("sizes", "seeds", "floor"), [(2, 2, 0), (3, 1, None), (5, 2, None)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(seed, monkeypatch, sizes, seeds, floor):
    """Of 95 %; they hold it in 92 to 96 % of many thousand tries, in 69 % with 3 x 1 where residuals are taken as they are."""
    monkeypatch.setattr("dcformer.studies.fit._DRAWS", 200)
    draw, held, tries = np.random.default_rng(seed), 0, 200
    for _ in range(tries):
        points = noisy(draw, laws(draw, np.tile(COSTS[:sizes], seeds), 1.7, floor), 0.004)
        first = multipliers(points, "ours", "theirs", COSTS[:sizes])["at"][0]
        held += first["low"] <= 1.7 <= (np.inf if first["high"] is None else first["high"])
    assert held >= 0.86 * tries


def test_the_same_points_give_the_same_interval_and_less_noise_a_narrower_one(seed):
    points = laws(np.random.default_rng(seed), COSTS, 1.7)
    loud, again, quiet = (
        multipliers(noisy(np.random.default_rng(seed), points, sd), "ours", "theirs", COSTS)["at"][2]
        for sd in (0.005, 0.005, 0.0005)
    )
    assert loud == again
    assert quiet["high"] - quiet["low"] < loud["high"] - loud["low"]


@pytest.mark.parametrize(("multiplier", "where"), [(2.0, -1), (0.5, 0)])
def test_beyond_the_other_models_runs_is_called_extrapolated(seed, multiplier, where):
    found = multipliers(laws(np.random.default_rng(seed), COSTS, multiplier), "ours", "theirs", COSTS)
    assert [i for i, each in enumerate(found["at"]) if each["extrapolated"]] == [range(5)[where]]


def test_a_loss_above_all_that_the_other_model_ever_has():
    def loss(x, height):
        return np.exp(height - 0.02 * x - 0.02 * x**2)

    x = np.array([-3.0, 0, 3])  # log of cost; losses are largest at -0.5
    points = {"ours": (np.exp(x), loss(x, 1.5)), "theirs": (np.exp(x), loss(x, 1.2))}
    least = multipliers(points, "ours", "theirs", np.exp(x))["at"][1]
    assert least["multiplier"] == 0 and least["extrapolated"]


def test_a_loss_that_the_other_model_never_has():
    points = {"ours": (COSTS[:2], np.array([3.0, 2.5])), "theirs": (COSTS[:2], np.array([3.0, 3.1]))}
    found = multipliers(points, "ours", "theirs", COSTS[:2])
    assert found["at"][1]["multiplier"] is None and found["at"][1]["extrapolated"]


def test_one_size_is_too_little():
    points = {model: (COSTS[:1], np.array([3.0])) for model in ("ours", "theirs")}
    assert multipliers(points, "ours", "theirs", COSTS[:1]) == {"curves": {}, "at": []}
