"""Upcycling: a pretrained model gets composable heads and is trained further, beside the same model without them.

Four ways of the same tokens: the composition alone ("composition"), everything with composition ("everything"), everything
without ("control"), and LoRA of as many parameters as the composition has ("lora").

E hidden size, T tokens a row.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from dcformer.conversion.convert import convert
from dcformer.nn import Compose
from dcformer.studies.evaluate import evaluate
from dcformer.studies.plot import save
from dcformer.studies.provenance import provenance
from dcformer.training import DataSettings, PreparedData, TrainSettings, prepare_data, train
from dcformer.training.files import explained_disk_errors, new_folder, write_json
from dcformer.training.metrics import read_metrics

WAYS = ("composition", "everything", "control", "lora")
NEW_WEIGHTS = ("composition", "lora")  # which start near nothing and take larger learning rates
_CHECKED_ROWS, _PROMPT, _NEW_TOKENS = 4, 32, 64


def upcycle(
    model: str,
    data: DataSettings,
    settings: TrainSettings,
    out: Path,
    *,
    learning_rates: Iterable[float] = (2e-5, 1e-4),
    new_weights_learning_rates: Iterable[float] = (5e-4, 2e-3),
    tasks: list[str] | None = None,
    include_path: Path | None = None,
    limit: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Trains a pretrained model further in each of the four ways, with as many learning rates each; evaluates the best of each.

    Text, its order, batch, schedule and number of steps are the same for all. What is done already is not done again.

    Args:
        model: a causal language model of transformers: a folder or a hub name.
        data: the text; the model's own tokenizer reads it.
        settings: how to train; `out` is the folder for the runs. `start`, `trainable` and `learning_rate` are set here.
        out: folder for upcycle.json, upcycle.png and upcycle.svg.
        learning_rates: for "everything" and "control".
        new_weights_learning_rates: for "composition" and "lora".
        tasks: of lm-eval, see `evaluate`; none by default.
        include_path: folder with task files.
        limit: rows a task.
        console: where progress is shown; None: nowhere.

    Returns:
        What upcycle.json holds: `identity`, how the converted model differs before training; `parameters`; `runs`, of every way
        and learning rate; `best`, by way, the run with the lowest final validation loss; `evaluations`, of these runs and
        of "pretrained"; `settings`, `data`, `provenance`.

    Raises:
        ValueError: the model cannot be converted, a setting is out of range, or `out` holds a study of something else.
        OSError: something could not be written.
    """
    work = Path(settings.out)
    prepared = prepare_data(replace(data, tokenizer=model))
    question = {
        "model": model,
        "settings": asdict(settings) | {"out": None, "limit": limit, "tasks": tasks},
        "data": {key: value for key, value in prepared.summary.items() if key != "cached"},
    }
    report = _earlier(out / "upcycle.json", question) | {"provenance": provenance()}

    def keep() -> None:
        with explained_disk_errors("the report", out):
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / "upcycle.json", report)

    converted = work / "converted"
    if not (converted / "config.json").exists():
        set_seed(settings.seed)
        changed = convert(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
        with new_folder(converted, "the converted model") as folder:
            changed.save_pretrained(folder)
            prepared.tokenizer.save_pretrained(folder)
    if "identity" not in report:
        report |= {"identity": _identity(model, str(converted), prepared, settings.eval_rows)}
        report |= {"parameters": _parameters(str(converted))}
        keep()
    lora = partial(_lora, parameters=report["parameters"]["composition"])
    for way in WAYS:
        start = str(converted) if way in ("composition", "everything") else model
        for rate in new_weights_learning_rates if way in NEW_WEIGHTS else learning_rates:
            name = f"{way}-{rate:g}"
            chosen = replace(
                settings,
                out=str(work / name),
                start=start,
                learning_rate=rate,
                trainable="composition" if way == "composition" else "all",
            )
            run = report["runs"].get(name, {})
            report["runs"][name] = run | _run(start, prepared, chosen, lora if way == "lora" else None, console)
            keep()
        finished = {
            name: r["evaluations"][-1]["loss"] for name, r in report["runs"].items() if r["way"] == way and not r["error"]
        }
        report["best"][way] = min(finished, key=finished.__getitem__) if finished else None
        keep()
    with explained_disk_errors("the plot", out):
        _plot(report, out)
    for way in ("pretrained", *WAYS):
        name = "pretrained" if way == "pretrained" else report["best"][way]
        if tasks and name is not None and name not in report["evaluations"]:
            trained = _load(model if way == "pretrained" else str(work / name), model)
            report["evaluations"][name] = evaluate(
                trained, prepared.tokenizer, tasks, include_path=include_path, limit=limit, answers=work / f"answers-{name}"
            )
            keep()
    return report


def _earlier(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """What an earlier process has found out about the same question."""
    if not path.exists():
        return {**question, "runs": {}, "best": {}, "evaluations": {}}
    earlier = json.loads(path.read_text())
    differing = [key for key, value in question.items() if earlier.get(key) != json.loads(json.dumps(value))]
    if differing:
        raise ValueError(f"{path} is of another study: {', '.join(differing)} differ; give another out and work folder")
    return earlier


@torch.no_grad()
def _identity(model: str, converted: str, data: PreparedData, rows: int | None) -> dict[str, Any]:
    """How much a converted model differs from the original, on held-out text, and its loss there before any training."""
    before, after = (AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval() for name in (model, converted))
    ids = torch.tensor(data.validation[: min(_CHECKED_ROWS, len(data.validation))]["input_ids"])
    logits = before(ids).logits
    prompt = {"input_ids": ids[:, :_PROMPT], "attention_mask": torch.ones_like(ids[:, :_PROMPT])}
    texts = [m.generate(**prompt, max_new_tokens=_NEW_TOKENS, do_sample=False) for m in (before, after)]
    evaluated = data.validation.select(range(min(rows or len(data.validation), len(data.validation))))["input_ids"]
    losses = [after(row, labels=row).loss.item() for row in torch.tensor(list(evaluated)).split(1)]
    return {
        "validation_loss": statistics.fmean(losses),
        "rows": len(ids),
        "largest_logit": logits.abs().max().item(),
        "largest_difference": (after(ids).logits - logits).abs().max().item(),
        "generated_tokens": texts[0].numel() - prompt["input_ids"].numel(),
        "generation_is_equal": torch.equal(*texts),
    }


def _parameters(converted: str) -> dict[str, int]:
    model = AutoModelForCausalLM.from_pretrained(converted)
    composition = sum(p.numel() for m in model.modules() if isinstance(m, Compose) for p in m.parameters())
    return {"pretrained": model.num_parameters() - composition, "composition": composition}


def _lora(model: PreTrainedModel, parameters: int) -> Any:
    """LoRA on all projections of attention, of the rank that comes nearest to that many parameters."""
    from peft import LoraConfig, get_peft_model

    from dcformer.conversion.attention import is_attention

    inside = [m for attention in model.modules() if is_attention(attention) for m in attention.modules()]
    linear = {id(m) for m in inside if isinstance(m, nn.Linear)}
    targets = {name: m for name, m in model.named_modules() if id(m) in linear}
    rank = max(1, round(parameters / sum(m.in_features + m.out_features for m in targets.values())))
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM"))


def _run(
    start: str,
    data: PreparedData,
    settings: TrainSettings,
    wrap: Callable[[PreTrainedModel], Any] | None,
    console: Console | None,
) -> dict[str, Any]:
    done = Path(settings.out, "result.json").exists()
    _forget_peak()
    trained: list[int] = []

    def wrapped(model: PreTrainedModel) -> Any:
        made = model if wrap is None else wrap(model)
        trained.append(sum(p.numel() for p in made.parameters() if p.requires_grad))
        return made

    try:
        train(AutoConfig.from_pretrained(start), data, settings, wrap=wrapped, console=console)
        error = None
    except FloatingPointError as diverged:
        error = str(diverged)
    lines = read_metrics(Path(settings.out, "metrics.jsonl"))
    speeds = [line["tokens_per_second"] for line in lines if line["split"] == "train"]
    found = {
        "way": Path(settings.out).name.partition("-")[0],
        "learning_rate": settings.learning_rate,
        "error": error,
        "evaluations": [{k: v for k, v in line.items() if k != "split"} for line in lines if line["split"] == "validation"],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds": lines[-1]["seconds"] if lines else 0.0,
    }
    # The process that trained knows the rest.
    return found if done else found | {"trained_parameters": trained[0], "peak_mib": _peak_mib()}


def _forget_peak() -> None:
    """Starts the measurement of the peak again, where the system can."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> int | None:
    """Of resident memory, or of the GPU's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 20
    try:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
    except (OSError, IndexError):
        return None


def _load(folder: str, model: str) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not Path(folder, "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).merge_and_unload().eval().to(device)


def _plot(report: dict[str, Any], folder: Path) -> None:
    figure = Figure(figsize=(6, 4.2), layout="constrained")
    axes = figure.subplots()
    for way, name in report["best"].items():
        if name is not None:
            evaluations = report["runs"][name]["evaluations"]
            axes.plot([e["tokens"] for e in evaluations], [e["loss"] for e in evaluations], marker=".", label=way)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, folder, "upcycle")
