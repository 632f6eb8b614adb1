"""Text to packed blocks of tokens, split by file into training and validation, cached on disk by content.

B rows, T tokens a row (`block_size`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import PreTrainedTokenizerFast


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
        tokenizer: what made the tokens; its end-of-text token stands between documents.
        bytes_per_token: UTF-8 bytes of the validation text over its tokens. Bits per byte = loss / ln 2 / bytes_per_token.
        summary: JSON-ready: for `train` and `validation` the number of files, bytes, tokens and rows; the files that were
            skipped and why; the fingerprint of text, tokenizer and block size.
    """

    train: Dataset
    validation: Dataset
    tokenizer: PreTrainedTokenizerFast
    bytes_per_token: float
    summary: dict[str, Any]


def prepare_data(settings: DataSettings) -> PreparedData:
    """Reads, splits, tokenizes and packs the text, or takes the result from the cache.

    The cache's key is the content of the files, not their place.

    Raises:
        ValueError: a named file is missing, empty or no text; there is no text at all; a split has less than one block.
    """
    raise NotImplementedError
