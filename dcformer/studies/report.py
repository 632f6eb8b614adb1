"""The arithmetic of a comparison: the difference and its spread, steps and FLOPs saved at equal loss, the verdict in words.

A run is a dict: `model` ("dcformer" or "transformer"), `seed`, `error` (None, or why it diverged), `evaluations` (dicts with
`step` and `loss`, the last one of the final model), `tokens_per_second`.
"""

from __future__ import annotations

import statistics
from typing import Any

from rich import box
from rich.table import Table

Run = dict[str, Any]
NAMES = {"dcformer": "DCFormer", "transformer": "Transformer"}


def first_step_at(evaluations: list[dict[str, Any]], loss: float) -> float | None:
    """The first step at which a curve, straight between its evaluations, is at or below `loss`.

    Returns:
        The step, rarely a whole number, or `None` where the curve never comes down to `loss`. A curve whose first evaluation is
        already there gives that evaluation's step: it may have been there before.
    """
    previous: dict[str, Any] | None = None
    for here in evaluations:
        if here["loss"] <= loss:
            if previous is None:
                return float(here["step"])
            share = (previous["loss"] - loss) / (previous["loss"] - here["loss"])
            return previous["step"] + share * (here["step"] - previous["step"])
        previous = here
    return None


def spread(values: list[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (`None` for fewer than two values), least and largest value, and how many."""
    if not values:
        return {"mean": None, "sd": None, "min": None, "max": None, "count": 0}
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "min": min(values), "max": max(values), "count": len(values)}


def summarize(runs: list[Run], flops_per_token: dict[str, float]) -> dict[str, Any]:
    """Compares the final losses, seed by seed, and asks when the better model reached the worse one's final loss.

    Seeds of which one run diverged count nowhere here. The better curve is read in mid-schedule, where its learning rate has
    not come down yet: a run planned for so many steps would end lower, so that savings are rather under- than overstated.

    Args:
        runs: finished and diverged ones of both models.
        flops_per_token: of a training step, by model.

    Returns:
        `final_loss`: spread over seeds, by model. `difference`: DCFormer's final loss minus the Transformer's, its spread and
        `by_seed`; negative means that the DCFormer is better. `saved`: `model`, the better one; `by_seed` its `step` at the
        other's final loss and the shares of `steps`, `flops` and `time` it saves, `None` where it never gets there, negative
        where it costs more; `steps`, `flops`, `time` are means over seeds, `None` unless every seed gets there. `verdict`: all
        this in words.
    """
    finished: dict[str, dict[int, Run]] = {
        model: {run["seed"]: run for run in runs if run["model"] == model and run["error"] is None} for model in NAMES
    }
    seeds = sorted(finished["dcformer"].keys() & finished["transformer"].keys())
    final = {model: [_final_loss(finished[model][seed]) for seed in seeds] for model in NAMES}
    differences = [ours - theirs for ours, theirs in zip(final["dcformer"], final["transformer"], strict=True)]
    difference = spread(differences)
    leader, follower = ("dcformer", "transformer") if not seeds or difference["mean"] <= 0 else ("transformer", "dcformer")
    savings = [_saved(finished[leader][seed], finished[follower][seed], flops_per_token) for seed in seeds]
    saved: dict[str, Any] = {"model": leader if seeds else None, "by_seed": savings}
    for what in ("steps", "flops", "time"):
        values = [each[what] for each in savings]
        saved[what] = statistics.fmean(values) if values and None not in values else None
    summary = {
        "final_loss": {model: spread(final[model]) for model in NAMES},
        "difference": difference | {"by_seed": [{"seed": s, "loss": d} for s, d in zip(seeds, differences, strict=True)]},
        "saved": saved,
    }
    return summary | {"verdict": _verdict(summary, [run for run in runs if run["error"] is not None])}


def table(report: dict[str, Any]) -> Table:
    """Validation at the end of training, a row a run, of the report that `dcformer.studies.compare.compare` returns."""
    titles = ("model", "seed", "parameters", "MFLOP/token", "tokens/s", "loss", "perplexity", "bits/byte")
    shown = Table(*titles, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for run in report["runs"]:
        model, speed = report["models"][run["model"]], run["tokens_per_second"]
        cells = [
            NAMES[run["model"]],
            str(run["seed"]),
            f"{model['parameters'] / 1e6:,.2f} M",
            f"{model['flops_per_token'] / 1e6:.2f}",
        ]
        cells.append(f"{speed:,.0f}" if speed else "")
        if run["error"] is None:
            last = run["evaluations"][-1]
            cells += [f"{last['loss']:.4f}", f"{last['perplexity']:.2f}", f"{last['bits_per_byte']:.4f}"]
        else:
            cells.append("diverged")
        shown.add_row(*cells)
    return shown


def _final_loss(run: Run) -> float:
    return run["evaluations"][-1]["loss"]


def _saved(leader: Run, follower: Run, flops_per_token: dict[str, float]) -> dict[str, Any]:
    """What the leader saves of the follower's whole training when it stops at the follower's final loss."""
    last, loss = follower["evaluations"][-1]["step"], _final_loss(follower)
    step = first_step_at(leader["evaluations"], loss)
    found: dict[str, Any] = {"seed": leader["seed"], "loss": loss, "step": step, "steps": None, "flops": None, "time": None}
    if step is not None:
        share = step / last
        found["steps"] = 1 - share
        found["flops"] = 1 - share * flops_per_token[leader["model"]] / flops_per_token[follower["model"]]
        found["time"] = 1 - share * follower["tokens_per_second"] / leader["tokens_per_second"]
    return found


def _verdict(summary: dict[str, Any], diverged: list[Run]) -> str:
    difference, saved = summary["difference"], summary["saved"]
    sentences = [f"{NAMES[run['model']]} with seed {run['seed']} diverged: {run['error']}." for run in diverged]
    if not difference["count"]:
        return " ".join([*sentences, "No seed finished with both models: no verdict."])
    mean, sd, count = difference["mean"], difference["sd"], difference["count"]
    leader, follower = NAMES[saved["model"]], NAMES[_other(saved["model"])]
    ours, theirs = (summary["final_loss"][model]["mean"] for model in ("dcformer", "transformer"))
    where = "level with" if mean == 0 else f"{abs(mean):.4f} {'below' if mean < 0 else 'above'}"
    seeds = "one seed" if sd is None else f"mean of {count} seeds, standard deviation of the difference {sd:.4f}"
    sentences.append(
        f"The DCFormer ends {where} the Transformer in validation loss, {ours:.4f} against {theirs:.4f} ({seeds})."
    )
    if sd is not None and abs(mean) <= sd:
        sentences.append("The difference is within its spread over seeds.")
    if saved["steps"] is None:
        reached = sum(each["step"] is not None for each in saved["by_seed"])
        sentences.append(f"The {leader} reaches the {follower}'s final loss with {reached} of {count} seeds.")
    elif mean != 0:
        amounts = ", ".join(
            _amount(saved[key], noun) for key, noun in (("steps", "steps"), ("flops", "FLOPs"), ("time", "time"))
        )
        sentences.append(f"The {leader} reaches the {follower}'s final loss with {amounts}.")
    return " ".join(sentences)


def _other(model: str) -> str:
    return next(name for name in NAMES if name != model)


def _amount(saved: float, noun: str) -> str:
    less = "less" if noun == "time" else "fewer"
    return f"{abs(saved):.1%} {less if saved >= 0 else 'more'} {noun}"
