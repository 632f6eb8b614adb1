"""What several commands need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dcformer.models.dcformer import DCFormerConfig

Checkpoint = Annotated[str, typer.Argument(help="Folder of a model, or its hub name, owner/name.", show_default=False)]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def console(stderr: bool = False) -> Console:
    """Standard output, or standard error, as rich writes to it."""
    from rich.console import Console

    return Console(stderr=stderr)


def quieten_transformers() -> None:
    """No progress bars and no warnings on standard error, which is for what went wrong."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load(checkpoint: str) -> tuple[Any, Any]:
    """The model and its tokenizer; untyped, as transformers' annotations do not say what a language model can do.

    Args:
        checkpoint: a folder, or a hub name where no such folder exists. Any model that `AutoModelForCausalLM` knows.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged, or of a kind that transformers does not know.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(checkpoint)
    on_the_hub = not folder.exists() and _HUB_NAME.fullmatch(checkpoint)
    if not on_the_hub and not (folder / "config.json").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint: there is no {folder / 'config.json'}")
    quieten_transformers()
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be loaded: {error}") from error
    model, found = loaded
    if found["missing_keys"]:
        raise ValueError(f"checkpoint {checkpoint} lacks weights: {', '.join(sorted(found['missing_keys']))}")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def read_config(file: Path) -> DCFormerConfig:
    """The configuration in a JSON file.

    Raises:
        ValueError: it is damaged, or does not describe a DCFormer.
    """
    from huggingface_hub.errors import StrictDataclassError

    from dcformer.models.dcformer import DCFormerConfig

    try:
        return DCFormerConfig(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{file} is no configuration of a DCFormer: {error}") from error
