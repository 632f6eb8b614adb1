"""What several commands need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False) -> Console:
    """Standard output, or standard error, as rich writes to it."""
    from rich.console import Console

    return Console(stderr=stderr)


def load(checkpoint: Path) -> tuple[Any, Any]:
    """The model and its tokenizer; untyped, as transformers' annotations do not say what a language model can do."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if not (checkpoint / "config.json").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint: there is no {checkpoint / 'config.json'}")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be loaded: {error}") from error
    model, found = loaded
    if found["missing_keys"]:
        raise ValueError(f"checkpoint {checkpoint} lacks weights: {', '.join(sorted(found['missing_keys']))}")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer
