"""Checkpoints that Orbax wrote on other devices, in the layouts that MaxText has had."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from maxtext_by_hand import nested, tree

from dcformer.models.orbax import OrbaxParameters

pytest.importorskip("orbax.checkpoint", reason="the extra maxtext is not installed")
ml_dtypes, msgpack = pytest.importorskip("ml_dtypes"), pytest.importorskip("msgpack")

QKW = "decoder.layers.self_attention_0.AttentionOp_0.dyn_w_proj.qkw"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Parameters, and a folder of the checkpoints that a process with four devices wrote of them."""
    folder, parameters = tmp_path_factory.mktemp("orbax"), tree(2, 2)
    np.savez(folder / "parameters.npz", **parameters)
    script = Path(__file__).with_name("maxtext_training.py")
    subprocess.run([sys.executable, script, folder / "parameters.npz", folder], check=True)
    parameters[QKW] = parameters[QKW].astype(ml_dtypes.bfloat16)
    return parameters, folder


def as_of_early_2024(item, target):
    """The same arrays as Orbax 0.5 left them: one file with the structure, no metadata."""
    shutil.copytree(item, target, ignore=shutil.ignore_patterns("_METADATA", "_sharding", "array_metadatas"))
    names = [path.name for path in target.iterdir() if path.is_dir()]
    (target / "checkpoint").write_bytes(msgpack.packb(nested({name: f"PLACEHOLDER://{name}" for name in names})))
    return target


@pytest.mark.parametrize("layout", ["theirs", "theirs/10", "theirs/9/state", "later", "early 2024"])
def test_parameters_are_read_bit_for_bit(saved, layout, tmp_path):
    parameters, folder = saved
    given = as_of_early_2024(folder / "theirs/10/state", tmp_path / "state") if layout == "early 2024" else folder / layout
    read = OrbaxParameters(given)
    assert len(read) == len(parameters) and set(read) == set(parameters)
    for name in ("token_embedder.embedding", "decoder.decoder_norm.scale", "decoder.layers.self_attention_1.out.kernel", QKW):
        array = read[name]
        assert type(array) is np.ndarray and array.dtype == parameters[name].dtype, name
        assert np.array_equal(array, parameters[name]), name


def test_the_last_step_is_taken(saved):
    assert OrbaxParameters(saved[1] / "theirs").folder == saved[1] / "theirs/10/state"  # by number, not by name


def test_a_relative_folder(saved, monkeypatch):
    monkeypatch.chdir(saved[1])
    assert len(OrbaxParameters(Path("theirs"))["decoder.decoder_norm.scale"])


def test_nothing_but_the_array_asked_for_is_read(saved, tmp_path):
    item, name = shutil.copytree(saved[1] / "theirs/10/state", tmp_path / "state"), "decoder.decoder_norm.scale"
    for file in item.glob("*.*/[0-9]*"):
        if file.parent.name != f"params.{name}":
            file.write_bytes(b"damaged")
    read = OrbaxParameters(item)
    assert np.array_equal(read[name], saved[0][name])
    with pytest.raises(ValueError, match=rf"params\.{QKW} in {item} cannot be read"):
        read[QKW]


@pytest.mark.parametrize("found", ["nothing", "text", "optimizer"])
def test_other_folders_are_refused(saved, tmp_path, found):
    given = tmp_path / "given"
    if found == "text":
        given.mkdir()
        (given / "config.json").write_text("{}")
    if found == "optimizer":
        as_of_early_2024(saved[1] / "theirs/10/state", given)
        for array in given.glob("params.*"):
            os.rename(array, given / f"moments.{array.name}")
    with pytest.raises(ValueError, match=f"{given} (is no Orbax checkpoint|has no parameters)"):
        OrbaxParameters(given)


def test_without_orbax_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax", None)
    monkeypatch.delitem(sys.modules, "orbax.checkpoint", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'dcformer\[maxtext\]'"):
        OrbaxParameters(tmp_path)
