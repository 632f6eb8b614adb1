"""Writing so that nothing is ever half there: under a temporary name, then renamed. Clear errors when a disk is full."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FAILED_WRITES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def write_json(path: Path, content: Any) -> None:
    """Replaces a file in one step: a reader sees the old content or the new."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, content: str) -> None:
    """As `write_json`. A kill may leave a hidden file whose name ends in `.partial`."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def publish(finished: Path, target: Path) -> None:
    """Gives a finished file or folder its final name in one step, once its content is on the disk."""
    for path in [finished, *finished.rglob("*")]:
        _flush(path)
    os.replace(finished, target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explained_disk_errors(what: str, folder: Path, needed: int | None = None) -> Iterator[None]:
    """Turns the various errors with which libraries report a failed write into one `OSError` that a user can act on.

    Args:
        what: what is being written, for the message.
        folder: where.
        needed: bytes that it takes, where known.

    Raises:
        OSError: with the number that the system gave (`errno.EIO` where the library hides it).
    """
    try:
        yield
    except Exception as error:
        number = _write_error(error)
        if number is None:
            raise
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        size = "" if needed is None else f" It takes about {needed:,} bytes;"
        message = f"could not write {what} in {folder}: {error}.{size} {free:,} bytes are free there."
        raise OSError(number, message) from error


def _write_error(error: BaseException | None) -> int | None:
    """The system's number for a failed write, None for any other error. Libraries in Rust and C++ only leave a text."""
    while error is not None:
        hidden = re.search(r"os error (\d+)", str(error))
        number = error.errno if isinstance(error, OSError) else int(hidden[1]) if hidden else None
        if number in _FAILED_WRITES:
            return number
        if isinstance(error, RuntimeError) and re.search(r"inline_container|PytorchStreamWriter", str(error)):
            return errno.EIO
        error = error.__cause__
    return None


@contextmanager
def new_folder(target: Path, what: str, needed: int | None = None) -> Iterator[Path]:
    """A folder to write into, which gets the name `target` once all of it is on the disk. Nothing is left where that fails.

    A kill may leave a hidden folder whose name ends in `.partial`, which the next try removes.

    Args:
        target: not there yet, or an empty folder.
        what: what is being written, and
        needed: how many bytes, for the message of `explained_disk_errors`.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    target = target.resolve()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with explained_disk_errors(what, target.parent, needed):
            partial.mkdir(parents=True)
            yield partial
            publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
