"""`convert`: composable heads for a pretrained model, and checkpoints from one format to another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dcformer.cli.common import load_any_model, load_model, quieten_transformers, read_config

_KINDS = ("dcformer", "dcpythia")
_OF_HEADS = (
    "layers", "rank", "groups", "query_wise", "key_wise", "gates", "static", "pre", "post", "adapter_only",
)  # fmt: skip
_HEADS, _FORMATS = "Composable heads", "Formats"
# What a checkpoint may hold besides its model, as transformers' tokenizers and processors name their files.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.spm",
    "normalizer.json",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.jinja",
)


def convert(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            help="Folder of the model, or its hub name, owner/name; of MaxText the folder of a run, a step or its state.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="New folder to write.", show_default=False)],
    layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a module to convert the attention of; may be repeated.", show_default="all", rich_help_panel=_HEADS
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the dynamic mixing.", rich_help_panel=_HEADS)] = 2,
    groups: Annotated[int, typer.Option(min=1, help="Heads mix only inside their group.", rich_help_panel=_HEADS)] = 1,
    query_wise: Annotated[bool, typer.Option(help="Mixing made from the query's state.", rich_help_panel=_HEADS)] = True,
    key_wise: Annotated[bool, typer.Option(help="Mixing made from the key's state.", rich_help_panel=_HEADS)] = True,
    gates: Annotated[bool, typer.Option(help="A dynamic gate for each head.", rich_help_panel=_HEADS)] = True,
    static: Annotated[bool, typer.Option(help="A learned mixing that is the same everywhere.", rich_help_panel=_HEADS)] = False,
    pre: Annotated[bool, typer.Option(help="Mixing of the scores.", rich_help_panel=_HEADS)] = True,
    post: Annotated[bool, typer.Option(help="Mixing of the weights.", rich_help_panel=_HEADS)] = True,
    adapter_only: Annotated[
        bool,
        typer.Option("--adapter-only", help="Write the composition and SOURCE's name only, a few MB.", rich_help_panel=_HEADS),
    ] = False,
    from_: Annotated[
        Literal["maxtext", "released", "hf"] | None,
        typer.Option(
            "--from",
            help="The authors' JAX training, the authors' PyTorch release, or ours.",
            show_default=False,
            rich_help_panel=_FORMATS,
        ),
    ] = None,
    to: Annotated[
        Literal["released", "hf"] | None,
        typer.Option(help="The authors' release, or ours.", show_default=False, rich_help_panel=_FORMATS),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="config.json for a MaxText checkpoint, which has none.", show_default=False, rich_help_panel=_FORMATS
        ),
    ] = None,
) -> None:
    """Give a model composable heads, its outputs unchanged; with --from and --to, write a checkpoint in another format."""
    ignored = [
        f"--{name.replace('_', '-')}"
        for name in _OF_HEADS
        if from_ is not None and context.get_parameter_source(name).name == "COMMANDLINE"  # type: ignore[union-attr]
    ]
    if ignored:
        raise typer.BadParameter("a change of the format composes no heads", param_hint=" / ".join(ignored))
    if (from_ is None) != (to is None):
        raise typer.BadParameter("give both to change the format, or neither", param_hint="--from / --to")
    if (from_ == "maxtext") != (config is not None):
        raise typer.BadParameter("give it for MaxText checkpoints, and only for them", param_hint="--config")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already; give --out a new folder")
    from dcformer.training.files import new_folder

    quieten_transformers()
    saving: dict[str, Any] = {"max_shard_size": "5GB"}
    if from_ is None:
        from dcformer import convert as give_composable_heads

        model, left_over = load_any_model(source)
        if left_over:
            typer.echo(f"{source} has weights that {type(model).__name__} has no place for: {', '.join(left_over)}", err=True)
        give_composable_heads(
            model, layers=layers, trainable="composition", rank=rank, groups=groups, query_wise=query_wise, key_wise=key_wise,
            gates=gates, static=static, pre=pre, post=post,
        )  # fmt: skip
        if adapter_only:
            saving = {"adapter_only": True}
    else:
        model = _from_folder(Path(source), from_) if config is None else _from_maxtext(Path(source), config)
        saving |= {"save_original_format": to == "released"}
    with new_folder(out, f"the checkpoint {out.name}", model.num_parameters() * model.dtype.itemsize) as folder:
        model.save_pretrained(folder, **saving)
        for path in () if from_ == "maxtext" else _companions(source):
            shutil.copyfile(path, folder / path.name)
    for path in sorted(out.iterdir()):
        typer.echo(f"{path}  {path.stat().st_size:,} bytes")


def _companions(source: str) -> list[Path]:
    """The files of a checkpoint that belong to its tokenizer or processor."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source, allow_patterns=list(_COMPANIONS)))
    return [path for pattern in _COMPANIONS for path in folder.glob(pattern)]


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
