"""What several commands need."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _loading(checkpoint: str) -> Iterator[None]:
    """Gives the many errors of a checkpoint that is not there, damaged or of an unknown kind one form."""
    from pickle import UnpicklingError

    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    folder = Path(checkpoint)
    on_the_hub = not folder.exists() and _HUB_NAME.fullmatch(checkpoint)
    if not on_the_hub and not (folder / "config.json").is_file():
        raise ValueError(f"{checkpoint} is no checkpoint: there is no {folder / 'config.json'}")
    quieten_transformers()
    try:
        yield
    except UnpicklingError as error:
        raise ValueError(f"checkpoint {checkpoint} is damaged, or holds code beside its weights, which is never run") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ValueError(f"checkpoint {checkpoint} cannot be loaded: {error}") from error


def load_config(checkpoint: str) -> Any:
    """The configuration of a checkpoint; errors as of `load_model`."""
    from transformers import AutoConfig

    with _loading(checkpoint):
        return AutoConfig.from_pretrained(checkpoint)


def load(checkpoint: str) -> tuple[Any, Any]:
    """The model, where there is a GPU on it, and its tokenizer; arguments and errors as of `load_model`."""
    import torch
    from transformers import AutoTokenizer

    with _loading(checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model, _ = load_model(checkpoint)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def load_model(checkpoint: str) -> tuple[Any, list[str]]:
    """The causal language model, and the names of weights that it has no place for; untyped, as transformers' annotations are.

    Args:
        checkpoint: a folder, or a hub name where no such folder exists. Any model that `AutoModelForCausalLM` knows.

    Raises:
        ValueError: there is no such checkpoint, or it is damaged, or of a kind that transformers does not know.
    """
    from transformers import AutoModelForCausalLM

    return _load(checkpoint, AutoModelForCausalLM)


def load_any_model(checkpoint: str) -> tuple[Any, list[str]]:
    """As `load_model`, of the class that the checkpoint names, which may be of any kind."""
    import transformers

    architectures = load_config(checkpoint).architectures or ["AutoModel"]
    return _load(checkpoint, getattr(transformers, architectures[0], transformers.AutoModelForCausalLM))


def _load(checkpoint: str, kind: Any) -> tuple[Any, list[str]]:
    with _loading(checkpoint):
        # Shapes that do not fit are let through, to be named below.
        model, found = kind.from_pretrained(checkpoint, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True)
    misfits = [f"{name} {list(stored)} in place of {list(ours)}" for name, stored, ours in sorted(found["mismatched_keys"])]
    if misfits:
        raise ValueError(f"checkpoint {checkpoint} has weights of another shape: {', '.join(misfits)}")
    if found["missing_keys"]:
        raise ValueError(f"checkpoint {checkpoint} lacks weights: {', '.join(sorted(found['missing_keys']))}")
    return model.eval(), sorted(found["unexpected_keys"])


def read_config(file: Path) -> DCFormerConfig:
    """The configuration in a JSON file, in our keys or in those of the released checkpoints.

    Raises:
        ValueError: it is damaged, or does not describe a DCFormer.
    """
    from huggingface_hub.errors import StrictDataclassError

    from dcformer.models.dcformer import DCFormerConfig

    try:
        keys = dict(json.loads(file.read_text(encoding="utf-8")))
        if keys.get("model_type", "dcformer") != "dcformer":
            raise ValueError(f"model_type={keys['model_type']!r} must be 'dcformer'")
        return DCFormerConfig.from_dict(keys)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{file} is no configuration of a DCFormer: {error}") from error
