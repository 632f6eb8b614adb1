"""Text to packed blocks of tokens, split by file into training and validation, cached on disk by content.

B rows, T tokens a row (`block_size`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from dcformer.training.files import explained_disk_errors, publish, write_json
from dcformer.training.sources import Source, find_sources
from dcformer.training.tokenizer import MIN_VOCAB_SIZE, load_tokenizer, train_tokenizer

# Part of the cache's key: raise it when the same text would be packed in another way.
_FORMAT = 1
# Longer documents are tokenized piece by piece, cut at line ends, so that memory stays small.
_PIECE = 1 << 20
_BATCH = 64
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class DataSettings:
    """Which text to train on and how it becomes blocks of tokens.

    Attributes:
        data: text files, folders, globs, .jsonl or .parquet files, or the name of a hub data set. Empty: the source code of the
            running Python's standard library, its tests left out.
        tokenizer: a tokenizer.json, a folder or a hub name. None: a byte-level BPE trained on the training files.
        vocab_size: entries of the tokenizer that is trained on the spot.
        block_size: T, tokens a row.
        validation_fraction: share of the text, in bytes of whole files, that is held out.
        text_field: column that holds the text of JSONL, Parquet and hub data sets.
        max_bytes: take at most that much text: whole files, in a stable shuffled order. None: all.
        cache_dir: where tokenized blocks are kept. None: `$XDG_CACHE_HOME/dcformer`, or `~/.cache/dcformer`.
    """

    data: tuple[str, ...] = ()
    tokenizer: str | None = None
    vocab_size: int = 4096
    block_size: int = 256
    validation_fraction: float = 0.05
    text_field: str = "text"
    max_bytes: int | None = None
    cache_dir: str | None = None


class PreparedData(NamedTuple):
    """Blocks to train and validate on.

    Attributes:
        train: rows of `input_ids`, T integers each.
        validation: the same, of files that are not in `train`.
        tokenizer: what made the tokens; its end-of-text token stands after each document.
        bytes_per_token: UTF-8 bytes of the validation text over its tokens. Bits per byte = loss / ln 2 / bytes_per_token.
        summary: JSON-ready: `train` and `validation`, each with `files`, `documents`, `bytes`, `tokens`, `rows`; `split`, what
            was not cut: "files", or, of a single file, "rows" or "lines"; `skipped`, how many files were left out, by reason;
            `fingerprint` of text, tokenizer and block size; `cached`, whether the blocks were there already.
    """

    train: Dataset
    validation: Dataset
    tokenizer: PreTrainedTokenizerFast
    bytes_per_token: float
    summary: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """A source, or what a split gave of it: documents `start` to `stop`, or characters where `by` is "lines"."""

    source: Source
    by: str = "files"
    start: int = 0
    stop: int | None = None

    def documents(self) -> Iterator[str]:
        documents = self.source.documents()
        if self.by == "lines":
            return iter([next(documents)[self.start : self.stop]])
        return islice(documents, self.start, self.stop)

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Text of limited length, and whether a document ends with it."""
        for text in self.documents():
            start = 0
            while len(text) - start > _PIECE:
                stop = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
                yield text[start:stop], False
                start = stop
            yield text[start:], True


def prepare_data(settings: DataSettings) -> PreparedData:
    """Reads, splits, tokenizes and packs the text, or takes the result from the cache.

    Validation holds whole files, chosen by their content, so that the split does not depend on names or folders. A single file
    is cut at the end of a row or line. Documents are joined, each followed by the end-of-text token, and cut into blocks; what
    is left at the end of a split is dropped. The cache's key is content and settings; several processes may share it.

    Raises:
        ValueError: a setting is out of range; a file named directly is missing, empty or no text; there is no text at all; a
            split has less than one block.
        OSError: the cache could not be written; the message has the folder.
    """
    _check(settings)
    sources, skipped = find_sources(settings.data, settings.text_field)
    if settings.max_bytes is not None:
        sources, left_out = _limit(sources, settings.max_bytes)
        if left_out:
            skipped[f"beyond max_bytes={settings.max_bytes}"] = left_out
    if not sources:
        raise ValueError(f"data={settings.data!r} holds no text; skipped: {skipped or 'nothing'}")
    train, validation = _split(sources, settings.validation_fraction)
    tokenizer = None if settings.tokenizer is None else load_tokenizer(settings.tokenizer)
    key = _key(train, validation, settings, tokenizer)
    cache = Path(settings.cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dcformer")).expanduser()
    cached = (cache / key).is_dir()
    if not cached:
        with explained_disk_errors("tokenized text", cache):
            _build(cache, key, train, validation, settings, tokenizer)
    summary = json.loads((cache / key / "summary.json").read_text())
    held_out = summary["validation"]
    return PreparedData(
        train=Dataset.from_file(str(cache / key / "train.arrow")),
        validation=Dataset.from_file(str(cache / key / "validation.arrow")),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(cache / key / "tokenizer"),
        bytes_per_token=held_out["bytes"] / held_out["tokens"],
        summary={**summary, "skipped": skipped, "fingerprint": key, "cached": cached},
    )


def _check(settings: DataSettings) -> None:
    if settings.block_size < 2:
        raise ValueError(f"block_size={settings.block_size} must be at least 2")
    if settings.vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size={settings.vocab_size} must be at least {MIN_VOCAB_SIZE}: all bytes and the end of a text")
    if not 0 < settings.validation_fraction <= 0.5:
        raise ValueError(f"validation_fraction={settings.validation_fraction} must be above 0 and at most 0.5")


def _limit(sources: list[Source], max_bytes: int) -> tuple[list[Source], int]:
    taken, total = [], 0
    for source in sources:
        if total + source.size <= max_bytes:
            taken.append(source)
            total += source.size
    return taken, len(sources) - len(taken)


def _split(sources: list[Source], fraction: float) -> tuple[list[_Part], list[_Part]]:
    """Training and validation. Sources come in the order of their digests, which is as good as drawn by chance."""
    if len(sources) == 1:
        return _cut(sources[0], fraction)
    budget = fraction * sum(source.size for source in sources)
    held_out: list[Source] = []
    # A file larger than the budget would take far more than the fraction: only if all are, the smallest is held out.
    for source in [s for s in sources if s.size <= budget] or [min(sources, key=lambda s: s.size)]:
        if sum(s.size for s in held_out) < budget:
            held_out.append(source)
    return [_Part(s) for s in sources if s not in held_out], [_Part(s) for s in held_out]


def _cut(source: Source, fraction: float) -> tuple[list[_Part], list[_Part]]:
    """A single source, cut near its end: between rows, or at the end of a line where it is one document."""
    sizes = [len(text.encode()) for text in source.documents()]
    if len(sizes) > 1:
        ends = np.cumsum(sizes)
        cut, by = int(np.searchsorted(ends, (1 - fraction) * ends[-1])), "rows"
        cut = min(max(cut, 1), len(sizes) - 1)
    else:
        text = next(source.documents(), "")
        last = int((1 - fraction) * len(text))
        cut, by = text.rfind("\n", 0, last) + 1 or last, "lines"
    return [_Part(source, by, 0, cut)], [_Part(source, by, cut)]


def _key(train: list[_Part], validation: list[_Part], settings: DataSettings, tokenizer: PreTrainedTokenizerFast | None) -> str:
    """What the blocks depend on. A trained tokenizer follows from the training text and its size."""
    if tokenizer is None:
        vocabulary: Any = settings.vocab_size
    else:
        vocabulary = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token]
    parts = [
        [(p.source.kind, p.source.digest, p.source.text_field, p.by, p.start, p.stop) for p in split]
        for split in (train, validation)
    ]
    content = json.dumps([_FORMAT, parts, vocabulary, settings.block_size])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _build(
    cache: Path,
    key: str,
    train: list[_Part],
    validation: list[_Part],
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerFast | None,
) -> None:
    """Fills a temporary folder, then gives it the key's name: a build that was killed is never read."""
    cache.mkdir(parents=True, exist_ok=True)
    for abandoned in cache.glob(".partial-*"):
        if time.time() - abandoned.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        if tokenizer is None:
            tokenizer = train_tokenizer((text for part in train for text, _ in part.pieces()), settings.vocab_size)
        tokenizer.save_pretrained(partial / "tokenizer")
        summary: dict[str, Any] = {"split": train[0].by, "vocab_size": len(tokenizer), "block_size": settings.block_size}
        for name, parts in (("train", train), ("validation", validation)):
            summary[name] = counts = _pack(parts, tokenizer, settings.block_size, partial / f"{name}.arrow")
            if not counts["rows"]:
                raise ValueError(
                    f"the {name} split has {counts['tokens']} tokens ({counts['bytes']} bytes in {counts['files']} files), "
                    f"fewer than block_size={settings.block_size}: more text, a smaller block_size or another "
                    "validation_fraction would do"
                )
        write_json(partial / "summary.json", summary)
        try:
            publish(partial, cache / key)
        except OSError:
            if not (cache / key).is_dir():  # another process was faster with the same content
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pack(parts: list[_Part], tokenizer: PreTrainedTokenizerFast, block_size: int, path: Path) -> dict[str, int]:
    """Writes rows of `block_size` tokens as an Arrow stream, which `Dataset.from_file` maps into memory. Returns counts."""
    schema = pyarrow.schema({"input_ids": pyarrow.list_(pyarrow.int32(), block_size)})
    counts = dict.fromkeys(("documents", "bytes", "tokens", "rows"), 0)
    pieces = (piece for part in parts for piece in part.pieces())
    rest: list[int] = []
    with pyarrow.ipc.new_stream(path, schema) as stream:
        while batch := list(islice(pieces, _BATCH)):
            texts = [text for text, _ in batch]
            tokens = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, return_attention_mask=False)
            before = len(rest)
            for ids, (_, ends) in zip(tokens["input_ids"], batch, strict=True):
                rest += ids
                if ends:
                    rest.append(tokenizer.eos_token_id)
            rows, left = divmod(len(rest), block_size)
            flat = pyarrow.array(rest[: rows * block_size], pyarrow.int32())
            blocks = pyarrow.FixedSizeListArray.from_arrays(flat, block_size)
            stream.write_batch(pyarrow.record_batch([blocks], schema=schema))
            counts["documents"] += sum(ends for _, ends in batch)
            counts["bytes"] += sum(len(text.encode()) for text in texts)
            counts["tokens"] += len(rest) - before
            counts["rows"] += rows
            rest = rest[len(rest) - left :]
    return {"files": len(parts), **counts}
