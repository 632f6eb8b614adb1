"""`convert`: checkpoints from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dcformer.cli.common import quieten_transformers, read_config


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint: of a run, a step or a step's state.")],
    out: Annotated[Path, typer.Option(help="New folder to write.", show_default=False)],
    from_: Annotated[Literal["maxtext"], typer.Option("--from", help="The authors' training code.", show_default=False)],
    to: Annotated[Literal["hf"], typer.Option(help="What dcformer and Hugging Face read.", show_default=False)],
    config: Annotated[
        Path, typer.Option(help="config.json of the model: a MaxText checkpoint does not hold all of it.", show_default=False)
    ],
) -> None:
    """Write a checkpoint in another format."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already; give --out a new folder")
    from dcformer.training.files import new_folder

    quieten_transformers()
    model = _from_maxtext(source, config)
    with new_folder(out, f"the checkpoint {out.name}", model.num_parameters() * model.dtype.itemsize) as folder:
        model.save_pretrained(folder, max_shard_size="5GB")
    for path in sorted(out.iterdir()):
        typer.echo(f"{path}  {path.stat().st_size:,} bytes")


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
