"""Writes a training state as MaxText does, spread over four devices: python maxtext_training.py PARAMETERS.npz FOLDER."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from maxtext_by_hand import nested

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))


def spread(array):
    axes = ("fsdp" if array.ndim and array.shape[0] % 4 == 0 else None,)
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes[: array.ndim])))


def save(folder, steps, state, **options):
    item = {"state": ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))}
    manager = ocp.CheckpointManager(folder, item)
    for step in steps:
        manager.save(step, {"state": state | {"step": np.int32(step)}})
    manager.wait_until_finished()


if __name__ == "__main__":
    parameters = nested(dict(np.load(sys.argv[1])))
    parameters = jax.tree.map(spread, parameters)
    qkw = parameters["decoder"]["layers"]["self_attention_0"]["AttentionOp_0"]["dyn_w_proj"]
    qkw["qkw"] = qkw["qkw"].astype("bfloat16")  # their code keeps it so
    moments = {"count": np.int32(2), "mu": parameters, "nu": parameters}
    folder = os.path.abspath(sys.argv[2])
    save(f"{folder}/theirs", (9, 10), {"params": parameters, "opt_state": (moments, ())}, use_ocdbt=False)
    save(f"{folder}/later", (3,), {"params": {"params": parameters}, "opt_state": [moments]})
