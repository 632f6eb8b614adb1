"""`dcformer serve`: the server of transformers, with our models in it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import typer

# Everything after the command's name goes to transformers, --help included.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context) -> None:
    """Serve a model to clients of OpenAI's protocol; takes what `transformers serve` takes."""
    import fastapi  # noqa: F401
    import openai  # noqa: F401
    import uvicorn  # noqa: F401
    from transformers.cli.serve import Serve
    from transformers.cli.serving.model_manager import ModelManager

    ModelManager._load_model = _load_model  # type: ignore[method-assign,assignment]
    server = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    server.command()(Serve)
    with suppress(KeyboardInterrupt, typer.Abort):  # raised once the server has closed
        server(context.args, prog_name="dcformer serve", standalone_mode=False)


def _load_model(
    manager: Any,
    model_id_and_revision: str,
    tqdm_class: type | None = None,
    progress_callback: Any = None,
    gguf_file: str | None = None,
) -> Any:
    """In place of transformers' own, which looks for classes among its own only."""
    from transformers import AutoModelForCausalLM
    from transformers.cli.serving.utils import split_revision

    model_id, revision = split_revision(model_id_and_revision)
    return AutoModelForCausalLM.from_pretrained(
        model_id,
        revision=revision,
        attn_implementation=manager.attn_implementation,
        dtype=manager.dtype,
        device_map=manager.device,
        quantization_config=manager.get_quantization_config(),
        gguf_file=gguf_file,
        tqdm_class=tqdm_class,
    )
