"""`convert`: checkpoints from one format to another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dcformer.cli.common import load_model, quieten_transformers, read_config

_KINDS = ("dcformer", "dcpythia")
# What a checkpoint may hold besides its model, as transformers' tokenizers name their files.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "*.jinja",
)


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint; of MaxText that of a run, a step or its state.")],
    out: Annotated[Path, typer.Option(help="New folder to write.", show_default=False)],
    from_: Annotated[
        Literal["maxtext", "released", "hf"],
        typer.Option("--from", help="The authors' JAX training, the authors' PyTorch release, or ours.", show_default=False),
    ],
    to: Annotated[Literal["released", "hf"], typer.Option(help="The authors' release, or ours.", show_default=False)],
    config: Annotated[
        Path | None, typer.Option(help="config.json for a MaxText checkpoint, which has none.", show_default=False)
    ] = None,
) -> None:
    """Write a checkpoint in another format."""
    if (from_ == "maxtext") != (config is not None):
        raise typer.BadParameter("give it for MaxText checkpoints, and only for them", param_hint="--config")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already; give --out a new folder")
    from dcformer.training.files import new_folder

    quieten_transformers()
    model = _from_folder(source, from_) if config is None else _from_maxtext(source, config)
    with new_folder(out, f"the checkpoint {out.name}", model.num_parameters() * model.dtype.itemsize) as folder:
        model.save_pretrained(folder, max_shard_size="5GB", save_original_format=to == "released")
        for pattern in () if from_ == "maxtext" else _TOKENIZER_FILES:
            for path in source.glob(pattern):
                shutil.copyfile(path, folder / path.name)
    for path in sorted(out.iterdir()):
        typer.echo(f"{path}  {path.stat().st_size:,} bytes")


def _from_folder(source: Path, wanted: str) -> Any:
    from dcformer.models.released import is_released

    file = source / "config.json"
    if not file.is_file():
        raise ValueError(f"{source} is no checkpoint: there is no {file}; for one of MaxText say --from maxtext")
    try:
        keys = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if keys.get("model_type") not in _KINDS:
        raise ValueError(f"{file} has model_type={keys.get('model_type')!r}; it must be one of {', '.join(_KINDS)}")
    found = "released" if is_released(keys) else "hf"
    if found != wanted:
        raise ValueError(f"{source} is not in the format {wanted!r}; say --from {found}")
    model, left_over = load_model(str(source))
    if left_over:
        raise ValueError(f"{source} has weights that its config.json has no place for: {', '.join(left_over)}")
    return model


def _from_maxtext(source: Path, file: Path) -> Any:
    import logging

    import torch

    from dcformer.models.dcformer import DCFormerForCausalLM
    from dcformer.models.maxtext import state_dict_from_maxtext
    from dcformer.models.orbax import OrbaxParameters

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about the layout of older checkpoints
    config = read_config(file)
    parameters = OrbaxParameters(source)
    with torch.device("meta"):
        model = DCFormerForCausalLM(config)
    model.load_state_dict(state_dict_from_maxtext(parameters, model), assign=True)  # buffers stay meta; none is saved
    return model
