"""Which tile a problem gets: the fastest of a few that run, found on a GPU when the problem comes for the first time."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from triton.runtime.errors import OutOfResources

Tile = TypeVar("Tile")
_chosen: dict[Hashable, Any] = {}


def choose(
    problem: Hashable,
    tiles: Sequence[Tile],
    trial: Callable[[], Callable[[Tile], object]],
    device: torch.device,
    timed: bool = True,
) -> Tile:
    """The tile for a problem, looked for once a process; the last of them where none fits, whose launch then says why.

    Where nothing may be tried it is the first: in the interpreter, and for a problem that comes while a CUDA graph records.
    With `timed=False`, DCFORMER_AUTOTUNE=0 or PyTorch's deterministic algorithms it is the first that fits into shared memory.

    Args:
        problem: what tells problems apart.
        tiles: the best guess first, those that need less memory behind those that need more.
        trial: makes a function that runs the problem with a given tile, on memory of its own since kernels work in place.
        device: where.
        timed: whether the problem is large enough for times to mean anything.
    """
    if device.type != "cuda":
        return tiles[0]
    timed = timed and os.environ.get("DCFORMER_AUTOTUNE") != "0" and not torch.are_deterministic_algorithms_enabled()
    key = (problem, device, timed)
    if key not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return tiles[0]
        run = trial()
        _chosen[key] = _fastest(tiles, run) if timed else _first(tiles, run)
    return _chosen[key]


def _first(tiles: Sequence[Tile], run: Callable[[Tile], object]) -> Tile:
    for tile in tiles[:-1]:
        try:
            run(tile)
        except OutOfResources:
            continue
        return tile
    return tiles[-1]


def _fastest(tiles: Sequence[Tile], run: Callable[[Tile], object]) -> Tile:
    times: dict[int, float] = {}
    for i, tile in enumerate(tiles):
        try:
            times[i] = milliseconds(partial(run, tile))
        except OutOfResources:
            continue
    return tiles[min(times, key=times.__getitem__)] if times else tiles[-1]


def milliseconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Time of the repeats on the device; the first run, which may compile, is not counted."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
