"""Training commands: `train` and `compare`."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dcformer.cli.common import console, load_config, read_config

if TYPE_CHECKING:
    from dcformer.models.dcformer import DCFormerConfig
    from dcformer.training import TrainSettings

# Options that several commands share. Each fills the field of DataSettings or TrainSettings that its parameter is named after;
# None leaves the field's default, or the preset's value.
Out = Annotated[Path, typer.Option(help="Folder for the results. The same command again goes on where it was stopped.")]
Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Text file, folder, glob, JSONL, Parquet or hub data set; may be repeated.",
        show_default="the source of Python's standard library",
        rich_help_panel="Data",
    ),
]
TextField = Annotated[
    str | None, typer.Option(help="Column of JSONL, Parquet and hub data sets.", show_default="text", rich_help_panel="Data")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="tokenizer.json, folder or hub name.", show_default="train a byte-level BPE", rich_help_panel="Data"),
]
VocabSize = Annotated[
    int | None, typer.Option(help="Entries of the tokenizer to train.", show_default="4096", rich_help_panel="Data")
]
BlockSize = Annotated[int | None, typer.Option(min=2, help="Tokens a row.", show_default="256", rich_help_panel="Data")]
Size = Annotated[
    str | None,
    typer.Option(
        help="1M, 3M, 10M, 25M, or the paper's 405M, 834M, 1.4B, 2.8B, 6.9B.", show_default="3M", rich_help_panel="Model"
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="JSON file with arguments of DCFormerConfig, in place of --size.", rich_help_panel="Model"),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Updates of the weights.", rich_help_panel="Training")]
Tokens = Annotated[int | None, typer.Option(min=1, help="Tokens to train on, in place of --steps.", rich_help_panel="Training")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Rows a micro batch.", show_default="16", rich_help_panel="Training")
]
Accumulation = Annotated[
    int | None,
    typer.Option("--gradient-accumulation", min=1, help="Micro batches a step.", show_default="1", rich_help_panel="Training"),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--learning-rate", "--lr", help="The peak.", show_default="1e-3", rich_help_panel="Training"),
]
CompositionRatio = Annotated[
    float | None,
    typer.Option(help="Share of it that composition weights take.", show_default="1", rich_help_panel="Training"),
]
WarmupSteps = Annotated[
    int | None, typer.Option(help="Steps of linear warm-up.", show_default="a tenth", rich_help_panel="Training")
]
Seed = Annotated[
    int | None, typer.Option(help="Of weights and order of the data.", show_default="0", rich_help_panel="Training")
]
Bf16 = Annotated[
    bool | None,
    typer.Option(
        "--bf16/--no-bf16", help="Autocast to bfloat16.", show_default="on a GPU that has it", rich_help_panel="Training"
    ),
]
Checkpointing = Annotated[
    bool | None,
    typer.Option("--gradient-checkpointing", help="Recompute activations: less memory.", rich_help_panel="Training"),
]
Compile = Annotated[bool | None, typer.Option("--compile", help="torch.compile.", rich_help_panel="Training")]
EvalEvery = Annotated[
    int | None,
    typer.Option(min=1, help="Steps between evaluations and checkpoints.", show_default="a tenth", rich_help_panel="Training"),
]
EvalRows = Annotated[
    int | None,
    typer.Option(min=1, help="Validation rows to evaluate on.", show_default="all", rich_help_panel="Training"),
]


def train(
    context: typer.Context,
    out: Out,
    data: Data = None,
    text_field: TextField = None,
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = None,
    block_size: BlockSize = None,
    size: Size = None,
    config: Config = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain attention: the Transformer++ baseline.", rich_help_panel="Model")
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Checkpoint to train further, in place of --size and --config: a folder or hub name. Brings its tokenizer.",
            rich_help_panel="Model",
        ),
    ] = None,
    trainable: Annotated[
        Literal["all", "composition"] | None,
        typer.Option(help="What is trained.", show_default="all", rich_help_panel="Training"),
    ] = None,
    steps: Steps = None,
    tokens: Tokens = None,
    batch_size: BatchSize = None,
    gradient_accumulation: Accumulation = None,
    learning_rate: LearningRate = None,
    composition_learning_rate_ratio: CompositionRatio = None,
    warmup_steps: WarmupSteps = None,
    seed: Seed = None,
    bf16: Bf16 = None,
    gradient_checkpointing: Checkpointing = None,
    compile: Compile = None,
    eval_every: EvalEvery = None,
    eval_rows: EvalRows = None,
) -> None:
    """Train a language model."""
    from dcformer import training

    given = given_options(context)
    if start is not None:
        if size or config or plain:
            raise typer.BadParameter("the model is that of --from", param_hint="--size / --config / --plain")
        given = {"tokenizer": start} | given
    data_settings = training.DataSettings(**fields_of(training.DataSettings, given))
    settings = _train_settings({}, given, data_settings.block_size)
    if start is None:
        new = _model_config(size, config, data_settings.block_size)
        if plain:
            new.compose = None
        prepared = training.prepare_data(data_settings)
        model_config = training.with_vocabulary(new, prepared.tokenizer)
    else:
        model_config = load_config(start)
        prepared = training.prepare_data(data_settings)
    result = training.train(model_config, prepared, settings, console=console(stderr=True))
    last = result.evaluations[-1]
    typer.echo(f"{out}: {result.parameters:,} parameters, {result.steps} steps, {result.tokens_per_second:,.0f} tokens/s")
    typer.echo(
        f"validation loss {last['loss']:.4f}, perplexity {last['perplexity']:.2f}, bits per byte {last['bits_per_byte']:.4f}"
    )


def compare(
    context: typer.Context,
    out: Out,
    preset: Annotated[
        Literal["demo"] | None, typer.Option(help="Settings to start from; other options still win.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to train each model with.")] = 1,
    equal: Annotated[
        Literal["parameters", "shape"],
        typer.Option(help="Widen the Transformer's MLP to as many parameters, or leave it in the same shape."),
    ] = "parameters",
    data: Data = None,
    text_field: TextField = None,
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = None,
    block_size: BlockSize = None,
    size: Size = None,
    config: Config = None,
    steps: Steps = None,
    tokens: Tokens = None,
    batch_size: BatchSize = None,
    gradient_accumulation: Accumulation = None,
    learning_rate: LearningRate = None,
    composition_learning_rate_ratio: CompositionRatio = None,
    warmup_steps: WarmupSteps = None,
    seed: Seed = None,
    bf16: Bf16 = None,
    gradient_checkpointing: Checkpointing = None,
    compile: Compile = None,
    eval_every: EvalEvery = None,
    eval_rows: EvalRows = None,
) -> None:
    """Train a DCFormer and the same-size Transformer on equal data, and say which learns better."""
    from dcformer.models.dcformer import DCFormerConfig
    from dcformer.studies.compare import PRESETS, Preset
    from dcformer.studies.compare import compare as run_comparison
    from dcformer.studies.report import table
    from dcformer.training import DataSettings

    given = given_options(context)
    chosen = PRESETS[preset] if preset else Preset(model={})
    data_settings = replace(chosen.data, **fields_of(DataSettings, given))
    settings = _train_settings(chosen.train, given, data_settings.block_size)
    if preset and not size and not config:
        model_config = DCFormerConfig(max_position_embeddings=data_settings.block_size, **chosen.model)
    else:
        model_config = _model_config(size, config, data_settings.block_size)
    report = run_comparison(model_config, data_settings, settings, seeds=seeds, equal=equal, console=console(stderr=True))
    shown = console()
    shown.print(table(report))
    shown.print(report["verdict"], highlight=False)
    shown.print(f"Curves and numbers: {out / 'curves.png'}, {out / 'compare.json'}", highlight=False, soft_wrap=True)


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options that the user gave."""
    given = {name: value for name, value in context.params.items() if value is not None}
    return given | {"data": tuple(given["data"])} if "data" in given else given


def fields_of(settings: type, given: dict[str, Any]) -> dict[str, Any]:
    """Of these options, those that a settings class has."""
    names = {field.name for field in fields(settings)}
    return {name: value for name, value in given.items() if name in names}


def _train_settings(preset: dict[str, Any], given: dict[str, Any], block_size: int) -> TrainSettings:
    from dcformer.training import TrainSettings

    if "steps" in given and "tokens" in given:
        raise typer.BadParameter("give one of them, not both", param_hint="--steps / --tokens")
    if not {"steps", "tokens"} & (preset.keys() | given.keys()):
        raise typer.BadParameter("say how long to train", param_hint="--steps / --tokens")
    options = preset | fields_of(TrainSettings, given)
    if "tokens" in given:
        rows = options.get("batch_size", TrainSettings.batch_size)
        rows *= options.get("gradient_accumulation", TrainSettings.gradient_accumulation)
        options["steps"] = math.ceil(given["tokens"] / (rows * block_size))
    return TrainSettings(**options | {"out": str(given["out"])})


def _model_config(size: str | None, file: Path | None, block_size: int) -> DCFormerConfig:
    if file is None:
        from dcformer.models.dcformer import DCFormerConfig

        return DCFormerConfig.from_size(size or "3M", max_position_embeddings=block_size)
    if size is not None:
        raise typer.BadParameter("give one of them, not both", param_hint="--size / --config")
    return read_config(file)
