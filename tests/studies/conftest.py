import random

import pytest

from dcformer.training import DataSettings

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Twelve files of random words, in a cache of their own."""
    folder, draw = tmp_path_factory.mktemp("text"), random.Random(0)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(WORDS, k=200)) + "\n")
    cache = str(tmp_path_factory.mktemp("cache"))
    return DataSettings(data=(str(folder),), vocab_size=300, block_size=16, cache_dir=cache)
