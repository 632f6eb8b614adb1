"""Where text comes from: text files, folders, globs, JSONL, Parquet, hub data sets, the standard library's source."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
from datasets import Dataset, load_dataset

_KINDS = {".jsonl": "jsonl", ".parquet": "parquet"}
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Source:
    """A file or hub data set that holds text.

    Attributes:
        name: what messages call it.
        kind: "text" (the file is one document), or "jsonl", "parquet", "hub" (each row is one).
        digest: SHA-256 of the content.
        size: bytes of the file; of the text for "hub".
        path: of the file.
        rows: of the hub data set.
        text_field: column of the text.
    """

    name: str
    kind: str
    digest: str
    size: int
    path: Path | None = None
    rows: Dataset | None = None
    text_field: str = "text"

    def documents(self) -> Iterator[str]:
        """The documents in their order, empty ones left out.

        Raises:
            ValueError: a row has no text; the message has file and line.
        """
        return (document for document in self._documents() if document)

    def _documents(self) -> Iterator[str]:
        if self.rows is not None:
            yield from (row[self.text_field] or "" for row in self.rows)
            return
        assert self.path is not None
        if self.kind == "text":
            yield self.path.read_bytes().decode()  # not read_text, which would rewrite line ends
        elif self.kind == "parquet":
            with pyarrow.parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(columns=[self.text_field]):
                    yield from (text or "" for text in batch.column(0).to_pylist())
        else:
            with self.path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._parse(line, number)

    def _parse(self, line: str, number: int) -> str:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"data: {self.name}, line {number}, is no JSON: {error}") from error
        text = row.get(self.text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"data: {self.name}, line {number}, has no text under text_field={self.text_field!r}")
        return text


def find_sources(data: tuple[str, ...], text_field: str) -> tuple[list[Source], dict[str, int]]:
    """Everything that `DataSettings.data` names, ordered by digest, each content once.

    The order looks shuffled, and depends neither on names nor on folders.

    Returns:
        the sources, and how many files of folders and globs were skipped, by reason.

    Raises:
        ValueError: a file named directly is missing, empty or no text; a glob matches nothing; a name is nothing we can read.
    """
    found: dict[tuple[str, str], Source] = {}
    skipped: Counter[str] = Counter()
    for source in _each(data, text_field, skipped):
        if (source.kind, source.digest) in found:
            skipped["the same content as another file"] += 1
        else:
            found[source.kind, source.digest] = source
    return sorted(found.values(), key=lambda source: source.digest), dict(skipped)


def _each(data: tuple[str, ...], text_field: str, skipped: Counter[str]) -> Iterator[Source]:
    if not data:
        yield from _inspect_all(_standard_library(), text_field, skipped)
    for entry in data:
        path = Path(entry).expanduser()
        if path.is_dir():
            yield from _inspect_all(_folder(path), text_field, skipped)
        elif path.exists():
            source = _inspect(path, text_field)
            if isinstance(source, str):
                raise ValueError(f"data: {entry} is {source}")
            yield source
        elif glob.has_magic(entry):
            matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
            if not matches:
                raise ValueError(f"data: no file matches {entry!r}")
            yield from _inspect_all([match for match in matches if match.is_file()], text_field, skipped)
        else:
            yield _hub(entry, text_field)


def _folder(folder: Path) -> list[Path]:
    """All files below, hidden ones left out."""
    names = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return [folder.joinpath(*parts) for parts in names if not any(part.startswith(".") for part in parts)]


def _standard_library() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for path in folder.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(folder).parts)]


def _inspect_all(paths: list[Path], text_field: str, skipped: Counter[str]) -> Iterator[Source]:
    for path in paths:
        source = _inspect(path, text_field)
        if isinstance(source, str):
            skipped[source] += 1
        else:
            yield source


def _inspect(path: Path, text_field: str) -> Source | str:
    """The file as a source, or what it is instead."""
    kind = _KINDS.get(path.suffix.lower(), "text")
    digest, size, decoder = hashlib.sha256(), 0, codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
                if kind != "parquet":
                    if b"\0" in chunk:
                        return "binary (it has NUL bytes)"
                    decoder.decode(chunk)
        decoder.decode(b"", final=True)
        if size == 0:
            return "empty"
        if kind == "parquet":
            schema = pyarrow.parquet.read_schema(path)
            if text_field not in schema.names:
                return f"without a column text_field={text_field!r} (it has {', '.join(schema.names)})"
    except UnicodeDecodeError:
        return "no UTF-8 text"
    except pyarrow.ArrowInvalid:
        return "no Parquet file"
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return Source(str(path), kind, digest.hexdigest(), size, path=path, text_field=text_field)


def _hub(name: str, text_field: str) -> Source:
    """The training split of a hub data set. A name that looks like a path is not looked up."""
    if name.count("/") > 1 or name.startswith((".", "~", "/")) or Path(name).suffix[1:].isalpha():
        raise ValueError(f"data: {name} does not exist")
    try:
        rows = load_dataset(name, split="train")
    except Exception as error:
        raise ValueError(f"data: {name!r} is no file or folder here and cannot be read as a hub data set: {error}") from error
    if text_field not in rows.column_names:
        raise ValueError(f"data: {name} has no column text_field={text_field!r}, but {', '.join(rows.column_names)}")
    rows, digest, size = rows.select_columns([text_field]), hashlib.sha256(), 0
    for row in rows:
        text = (row[text_field] or "").encode()
        size += len(text)
        digest.update(len(text).to_bytes(8) + text)
    return Source(name, "hub", digest.hexdigest(), size, rows=rows, text_field=text_field)
