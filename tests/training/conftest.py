import multiprocessing
import os
import random
from multiprocessing import forkserver
from pathlib import Path

import pytest

from dcformer.training import DataSettings, prepare_data

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]


def sentences(draw, lines):
    return "\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(lines)) + "\n"


@pytest.fixture
def texts(seed):
    """A maker of random text of so many lines."""
    draw = random.Random(seed)
    return lambda lines: sentences(draw, lines)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Small blocks of text, the same for every test, in a cache of their own."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for number in range(20):
        (folder / f"{number}.txt").write_text(sentences(draw, 20))
    cache = str(tmp_path_factory.mktemp("cache"))
    return prepare_data(DataSettings(data=(str(folder),), vocab_size=300, block_size=32, cache_dir=cache))


@pytest.fixture(scope="session")
def processes():
    """Starts processes quickly: all are forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context
