"""A run that takes a second, and ways to end its process in the middle."""

import os
import pkgutil
import resource
import signal
from functools import partial

from dcformer.models.dcformer import DCFormerConfig
from dcformer.training import TrainSettings, prepare_data, train


def tiny_config(**changes):
    """Dropout is on, so that every random number counts."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 300}
    return DCFormerConfig(**{**shape, "attention_dropout": 0.1, **changes})


def tiny_settings(out, **changes):
    few = {"steps": 8, "batch_size": 2, "save_every": 2, "eval_every": 4, "eval_rows": 4}
    return TrainSettings(out=str(out), **{**few, **changes})


def at_call(function, count, act):
    """Has this call of the function made by `act(original, *args)`."""
    owner, _, name = function.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(args)
        return act(partial(original, *args, **kwargs), *args) if len(calls) == count else original(*args, **kwargs)

    setattr(owner, name, call)


def die(function, count, when):
    """Ends the process by SIGKILL at this call: "before", "after", or when the file that it writes is "halfway" there."""

    def act(original, *args):
        if when != "before":
            original()
        if when == "halfway":
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    at_call(function, count, act)


def fill_disk(function, count):
    """From this call on no file of the process can be longer than 1000 bytes."""

    def act(original, *args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return original()

    at_call(function, count, act)


def prepare(settings, arrange):
    """For a process of its own: prepares data, after `arrange` has set what will go wrong."""
    arrange()
    prepare_data(settings)


def train_tiny(out, data, arrange=None, **changes):
    """For a process of its own: trains, after `arrange` has set what will go wrong."""
    if arrange is not None:
        arrange()
    return train(tiny_config(), data, tiny_settings(out, **changes))
