"""A run that takes a second, and ways to end its process in the middle."""

import os
import pkgutil
import signal

from dcformer.models.dcformer import DCFormerConfig
from dcformer.training import TrainSettings, prepare_data, train


def tiny_config(**changes):
    """Dropout is on, so that every random number counts."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    return DCFormerConfig(**{**shape, "attention_dropout": 0.1, **changes})


def tiny_settings(out, **changes):
    few = {"steps": 8, "batch_size": 2, "save_every": 2, "eval_every": 4, "eval_rows": 4}
    return TrainSettings(out=str(out), **{**few, **changes})


def die(function, count, when):
    """Ends the process by SIGKILL at this call of the function: "before", "after", or when its file is "halfway" written."""
    owner, _, name = function.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) != count:
            return original(*args, **kwargs)
        if when != "before":
            original(*args, **kwargs)
        if when == "halfway":
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, call)


def prepare(settings, moment):
    """For a process of its own: prepares data, and dies."""
    die(*moment)
    prepare_data(settings)


def train_tiny(out, data, arrange=None, **changes):
    """For a process of its own: trains, after `arrange` has set what will go wrong."""
    if arrange is not None:
        arrange()
    return train(tiny_config(), data, tiny_settings(out, **changes))
