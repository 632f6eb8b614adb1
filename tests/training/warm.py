"""Imported once by the process that all others of these tests are forked from, so that each of them starts in no time."""

import gc
from importlib import import_module

for name in ("tiny_run", "dcformer.models.dcformer.modeling_dcformer", "torch.utils.tensorboard"):
    import_module(name)
gc.collect()
gc.freeze()  # the Trainer collects garbage when it starts, which takes a second with so many modules
