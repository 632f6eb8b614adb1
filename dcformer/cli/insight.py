"""Commands that look into the heads of a trained model: `analyze` and `explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dcformer.cli.common import Checkpoint, console, load
from dcformer.cli.training import BlockSize, Data, TextField, fields_of, given_options


def analyze(
    context: typer.Context,
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option(help="New folder for figures and pictures.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows of text to measure on.")] = 16,
    data: Data = None,
    text_field: TextField = None,
    block_size: BlockSize = None,
) -> None:
    """Measure on real text what composition does to a model's heads, layer by layer."""
    from dcformer.studies.analyze import analyze as measure
    from dcformer.studies.analyze import table
    from dcformer.training import DataSettings

    model, _ = load(checkpoint)
    settings = DataSettings(tokenizer=checkpoint, **fields_of(DataSettings, given_options(context)))
    report = measure(model, settings, out, checkpoint=checkpoint, rows=rows, console=console(stderr=True))
    shown = console()
    shown.print(table(report))
    shown.print(f"Pictures and numbers: {out / 'layers.png'}, {out / 'analysis.json'}", highlight=False, soft_wrap=True)


def explain(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Argument(help="What the model reads.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("explain.html"),
) -> None:
    """Make a page, to open in a browser, on which one sees how the heads attend to a text and flow into each other."""
    from dcformer.studies.explain import explain as make_page
    from dcformer.training.files import explained_disk_errors, write_text

    model, tokenizer = load(checkpoint)
    page = make_page(model, tokenizer, text, checkpoint=checkpoint)
    out.parent.mkdir(parents=True, exist_ok=True)
    with explained_disk_errors("the page", out.parent):
        write_text(out, page)
    typer.echo(f"Open {out} in a browser.")
