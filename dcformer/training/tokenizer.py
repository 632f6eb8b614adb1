"""The tokenizer: a byte-level BPE trained on the spot, or one that the user names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# What published tokenizer.json files call the end of a text; the file itself does not say which token it is.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
MIN_VOCAB_SIZE = 257  # every byte, and the end of a text


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2's pre-tokenizer). The same texts give the same tokenizer.

    Args:
        texts: what to learn merges from.
        vocab_size: at most that many entries; fewer where the text has no more pairs that repeat.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer.json, a folder that `save_pretrained` wrote, or a hub name.

    Raises:
        ValueError: it cannot be read, or it has no token for the end of a text.
    """
    tokenizer: PreTrainedTokenizerBase
    try:
        if Path(name).is_file():
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise ValueError(f"tokenizer={name!r} cannot be read: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"tokenizer={name!r} is a {type(tokenizer).__name__}; one with a tokenizer.json would do")
    if tokenizer.eos_token is None:
        vocabulary = tokenizer.get_vocab()
        tokenizer.eos_token = next((token for token in _KNOWN_ENDS if token in vocabulary), None)
    if tokenizer.eos_token is None:
        raise ValueError(
            f"tokenizer={name!r} has no end-of-text token; a folder whose tokenizer_config.json has eos_token would do"
        )
    return tokenizer


def with_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """A copy of a model's configuration with the tokenizer's vocabulary size."""
    config = copy.deepcopy(config)
    config.vocab_size = len(tokenizer)
    return config
