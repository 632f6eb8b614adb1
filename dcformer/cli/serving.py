"""`dcformer serve`: the server of transformers, with our models in it."""

from __future__ import annotations

from contextlib import suppress

import typer

# Everything after the command's name goes to transformers, --help included.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context) -> None:
    """Serve a model to clients of OpenAI's protocol; takes what `transformers serve` takes."""
    import fastapi  # noqa: F401
    import openai  # noqa: F401
    import uvicorn  # noqa: F401
    from transformers.cli.serve import Serve
    from transformers.cli.serving import model_manager

    from dcformer.cli.loader import Loader

    model_manager.ModelLoader = Loader  # type: ignore[misc]
    server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    server.command()(Serve)
    with suppress(KeyboardInterrupt, typer.Abort):  # raised once the server has closed
        server(context.args, prog_name="dcformer serve", standalone_mode=False)
