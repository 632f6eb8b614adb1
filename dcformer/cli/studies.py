"""`dcformer study`: measurements of the paper's claims, a command each. Every one goes on where it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcformer.cli.common import Checkpoint, console, load, quieten_transformers
from dcformer.cli.training import (
    BatchSize,
    Bf16,
    BlockSize,
    Data,
    EvalEvery,
    EvalRows,
    TextField,
    Tokenizer,
    VocabSize,
    fields_of,
    given_options,
)

study = typer.Typer(help="Measure the paper's claims on this machine; each study goes on where it was stopped.")

Out = Annotated[Path, typer.Option(help="Folder for figures, plot and a small record of each run.")]
Work = Annotated[Path, typer.Option(help="Folder for checkpoints and models, which are too large for --out.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds to train each model with.")]


@study.command()
def scaling(
    context: typer.Context,
    out: Out,
    work: Work = Path("runs/scaling"),
    rungs: Annotated[int, typer.Option(min=1, help="How many sizes, from the smallest.")] = 5,
    tokens_per_parameter: Annotated[float, typer.Option(help="Training tokens a parameter, embeddings not counted.")] = 20,
    seeds: Seeds = 1,
    rates: Annotated[str, typer.Option(help="Learning rates to choose from, for both models.")] = "2e-3,4e-3,8e-3",
    tuned: Annotated[
        int, typer.Option(min=1, help="Rungs to try all rates on; larger ones take what the last of these found.")
    ] = 2,
    data: Data = None,
    text_field: TextField = None,
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = None,
    block_size: BlockSize = None,
    bf16: Bf16 = None,
) -> None:
    """Train a ladder of sizes with and without composition: how much compute and time does it save at equal loss?"""
    from dcformer.studies.scaling import RUNGS, Ladder, paragraph
    from dcformer.studies.scaling import scaling as climb
    from dcformer.training import DataSettings

    chosen = list(RUNGS)[:rungs]
    ladder = Ladder(
        rungs={name: RUNGS[name] for name in chosen},
        tokens_per_parameter=tokens_per_parameter,
        seeds=seeds,
        rates=_numbers(rates, "--rates"),
        tuned=tuned,
    )
    if bf16 is not None:
        ladder.train["bf16"] = bf16
    settings = DataSettings(**fields_of(DataSettings, given_options(context)))
    report = climb(settings, ladder, out, work, console=console(stderr=True))
    shown = console()
    shown.print(paragraph(report), highlight=False)
    shown.print(f"Plot and numbers: {out / 'scaling.png'}, {out / 'summary.json'}", highlight=False, soft_wrap=True)


@study.command()
def ablation(
    context: typer.Context,
    out: Out,
    work: Work = Path("runs/ablation"),
    tokens: Annotated[int, typer.Option(min=1, help="To train each row on.")] = 8_000_000,
    seeds: Seeds = 1,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", min=0, help="The peak, for all rows.")] = 4e-3,
    data: Data = None,
    text_field: TextField = None,
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = None,
    block_size: BlockSize = None,
    bf16: Bf16 = None,
) -> None:
    """Train one model with its parts left out or changed in turn, and two rivals, on one budget, and rank them."""
    from dcformer.studies.ablation import Ablation, paragraph
    from dcformer.studies.ablation import ablation as train_rows
    from dcformer.training import DataSettings

    settings = Ablation(tokens=tokens, seeds=seeds)
    settings.train["learning_rate"] = learning_rate
    if bf16 is not None:
        settings.train["bf16"] = bf16
    text = DataSettings(**fields_of(DataSettings, given_options(context)))
    report = train_rows(text, settings, out, work, console=console(stderr=True))
    typer.echo(paragraph(report))
    typer.echo(f"Plot and numbers: {out / 'ablation.png'}, {out / 'summary.json'}")


@study.command()
def synthetic(
    out: Out,
    work: Work = Path("runs/synthetic"),
    tokens: Annotated[int, typer.Option(min=1, help="To train each model on.")] = 12_000_000,
    seeds: Seeds = 1,
    learning_rate: Annotated[float, typer.Option("--learning-rate", "--lr", min=0, help="The peak, for both models.")] = 2e-3,
    bf16: Bf16 = None,
) -> None:
    """Train small models with and without composition on a mixture of tasks: which predicts the words in brackets better?"""
    from dcformer.studies.synthetic import Synthetic, paragraph
    from dcformer.studies.synthetic import synthetic as train_both

    quieten_transformers()
    settings = Synthetic(tokens=tokens, seeds=seeds)
    settings.train["learning_rate"] = learning_rate
    if bf16 is not None:
        settings.train["bf16"] = bf16
    report = train_both(settings, out, work, console=console(stderr=True))
    typer.echo(paragraph(report))
    typer.echo(f"Plot and numbers: {out / 'synthetic.png'}, {out / 'summary.json'}")


@study.command()
def brackets(
    checkpoint: Checkpoint,
    tasks: Annotated[
        Path, typer.Argument(help="JSONL file with task_id and texts, in which [ brackets ] mark words.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="JSON file for the figures.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Texts at once.")] = 8,
) -> None:
    """Evaluate a trained model on the words in brackets of a file of tasks, such as the authors' synthetic ones."""
    from dcformer.studies.brackets import bracket_accuracy, read_tasks, report_on, table
    from dcformer.training.files import explained_disk_errors, write_json

    texts = read_tasks(tasks)
    model, tokenizer = load(checkpoint)
    found = bracket_accuracy(model, tokenizer, texts, batch_size=batch_size, console=console(stderr=True))
    report = report_on(tasks, found, checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    with explained_disk_errors("the figures", out.parent):
        write_json(out, report)
    shown = console()
    shown.print(table(found))
    shown.print(f"Mean over families: accuracy {report['accuracy']:.1%}, {report['loss']:.3f} nats a word", highlight=False)
    shown.print(f"Figures: {out}", highlight=False, soft_wrap=True)


@study.command()
def upcycle(
    context: typer.Context,
    model: Checkpoint,
    out: Out,
    work: Work = Path("runs/upcycle"),
    data: Data = None,
    text_field: TextField = None,
    block_size: BlockSize = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights, in each run.")] = 100,
    batch_size: BatchSize = None,
    eval_every: EvalEvery = None,
    eval_rows: EvalRows = None,
    bf16: Bf16 = None,
    tasks: Annotated[
        list[str] | None, typer.Option(help="Tasks to evaluate on, comma-separated, as of `evaluate`; may be repeated.")
    ] = None,
    include_path: Annotated[Path | None, typer.Option(help="Folder with task files.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows a task.", show_default="all")] = None,
) -> None:
    """Convert a pretrained model and train it further: the composition alone, everything, everything without it, LoRA."""
    from dcformer.studies.upcycle import upcycle as train_each_way
    from dcformer.training import DataSettings, TrainSettings

    quieten_transformers()
    given = given_options(context) | {"out": str(work)}
    report = train_each_way(
        model,
        DataSettings(**fields_of(DataSettings, given)),
        TrainSettings(**fields_of(TrainSettings, given)),
        out,
        tasks=[name for names in tasks or () for name in names.split(",")],
        include_path=include_path,
        limit=limit,
        console=console(stderr=True),
    )
    for way, name in report["best"].items():
        loss = report["runs"][name]["evaluations"][-1]["loss"] if name else float("nan")
        typer.echo(f"{way:12} validation loss {loss:.4f}, from {report['identity']['validation_loss']:.4f}")
    typer.echo(f"Plot and numbers: {out / 'upcycle.png'}, {out / 'upcycle.json'}")


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be numbers, comma-separated", param_hint=option) from error
