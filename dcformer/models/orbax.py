"""Parameters of a checkpoint that Orbax wrote: one array at a time, without its devices and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcformer.models.maxtext import flattened


class OrbaxParameters(Mapping[str, np.ndarray]):
    """The arrays below `params` by dotted name, read when they are asked for. Optimizer state and step are never read.

    Args:
        folder: of one item, of a step, or of all steps, of which the last is taken. MaxText writes `checkpoints/STEP/state`;
            later versions call the item `items` or `default`.

    Raises:
        ModuleNotFoundError: Orbax is not installed, and how to.
        ValueError: no checkpoint with parameters is there, or it is damaged; of an array one learns that on reading it.
    """

    def __init__(self, folder: Path):
        try:
            import orbax.checkpoint
        except ImportError as error:
            how = "reading MaxText checkpoints needs orbax-checkpoint: pip install 'dcformer[maxtext]'"
            raise ModuleNotFoundError(how, name="orbax") from error
        self._orbax = orbax.checkpoint
        self.folder = _item(folder.resolve())  # Orbax takes absolute paths only
        self._reader = self._orbax.PyTreeCheckpointer()
        # Their Orbax of early 2024 wrote no metadata, but a folder for each array.
        self._described = (self.folder / "_METADATA").exists()
        if self._described:
            described = self._reader.metadata(self.folder).item_metadata
            if described is None:
                raise ValueError(f"{self.folder} is damaged or not whole: Orbax cannot say what is in it")
            paths = list(flattened(described.tree))
        else:
            paths = [path.name for path in self.folder.iterdir() if path.is_dir()]
        self._paths = {_name(path): path for path in paths if path.startswith("params.")}
        if not self._paths:
            raise ValueError(f"{self.folder} has no parameters; Orbax finds {', '.join(sorted(paths)) or 'nothing'} there")

    def __getitem__(self, name: str) -> np.ndarray:
        keys = self._paths[name].split(".")
        # Without metadata only the older way of naming what is wanted works.
        part: dict[str, Any] = {"partial_restore": True} if self._described else {"transforms": {}}
        as_numpy = self._orbax.RestoreArgs(restore_type=np.ndarray)
        wanted = self._orbax.args.PyTreeRestore(item=_nested(keys, 0), restore_args=_nested(keys, as_numpy), **part)
        try:
            restored: Any = self._reader.restore(self.folder, args=wanted)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._paths[name]} in {self.folder} cannot be read: {error}") from error
        for key in keys:
            restored = restored[key]
        return restored

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _item(folder: Path) -> Path:
    """The folder of the arrays in that of an item, a step or a run."""
    steps = [int(path.name) for path in folder.glob("*") if path.is_dir() and path.name.isdigit()]
    within = [folder / name for name in ("state", "items", "default") if (folder / name).is_dir()]
    if (folder / "_METADATA").exists() or any(folder.glob("params.*")):
        return folder
    if steps:
        return _item(folder / str(max(steps)))
    if within:
        return _item(within[0])
    raise ValueError(f"{folder} is no Orbax checkpoint; give the folder of one, of a step in it or of its state")


def _name(path: str) -> str:
    """Without the outer names; flax may add a collection that is called `params` too."""
    while path.startswith("params."):
        path = path.removeprefix("params.")
    return path


def _nested(keys: list[str], leaf: Any) -> Any:
    for key in reversed(keys):
        leaf = {key: leaf}
    return leaf
