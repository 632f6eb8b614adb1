"""`dcformer convert`: what it writes, and what it says and leaves where that fails."""

import json
import resource
import shutil

import pytest
import torch
from maxtext_by_hand import D, E, N, V, logits, nested, tree
from transformers import AutoModelForCausalLM

from dcformer import DCFormerForCausalLM
from dcformer.cli import run

CONFIG = {
    "model_type": "dcformer",
    "vocab_size": V,
    "hidden_size": E,
    "num_attention_heads": N,
    "head_dim": D,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "window_pattern": "LG",
    "sliding_window": 3,
    "qk_norm": True,
}


@pytest.fixture
def convert(capfd):
    """Runs the command; gives exit code, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            run(["convert", *map(str, arguments)])
        return stop.value.code or 0, *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory):
    """A folder with a configuration and a checkpoint that Orbax wrote, and its tree."""
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="the extra maxtext is not installed")
    folder, parameters = tmp_path_factory.mktemp("maxtext"), tree(2, 2)
    checkpoint.PyTreeCheckpointer(use_ocdbt=False).save(folder / "state", {"params": nested(parameters)})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder, parameters


def of_maxtext(folder, config=None):
    return folder / "state", "--from", "maxtext", "--to", "hf", "--config", config or folder / "config.json"


def test_a_maxtext_checkpoint_becomes_one_that_loads(convert, maxtext, tmp_path):
    folder, parameters = maxtext
    code, out, err = convert(*of_maxtext(folder), "--out", tmp_path / "deep/new")
    assert (code, err) == (0, "")
    assert "config.json" in out and "model.safetensors" in out
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["new"]
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "deep/new"), torch.randint(V, (2, 9))
    with torch.no_grad():
        ours = model(ids).logits
    torch.testing.assert_close(ours, logits(parameters, ids, [3, None], eps=1e-6), atol=1e-4, rtol=1e-4)


def _lose(folder):
    shutil.rmtree(next(folder.glob("state/params.decoder.decoder_norm*")))


def _truncate(folder):
    for file in folder.glob("state/params.token_embedder*/[0-9]*"):
        file.write_bytes(file.read_bytes()[:9])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_lose, "damaged or not whole"),
        (_truncate, "token_embedder.embedding"),
        (lambda folder: shutil.rmtree(folder / "state"), "state is no Orbax checkpoint"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text('{"hidden_size": '), "config.json is no configuration"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 5})), "multiple of 2"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": V + 1})), f"[{V + 1}, {E}]"),
    ],
)
def test_a_source_that_is_no_good_is_one_line_and_nothing_is_written(convert, maxtext, tmp_path, change, named):
    folder = shutil.copytree(maxtext[0], tmp_path / "source")
    change(folder)
    code, out, err = convert(*of_maxtext(folder), "--out", tmp_path / "new")
    assert (code, out) == (1, "")
    assert err.startswith("dcformer: ") and err.count("\n") == 1 and named in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_that_is_there_stays_as_it_is(convert, maxtext, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text("mine")
    for target in ("new", "new/config.json"):
        code, _, err = convert(*of_maxtext(maxtext[0]), "--out", tmp_path / target)
        assert code == 1 and f"{tmp_path / target} is there already" in err
    assert (tmp_path / "new" / "config.json").read_text() == "mine"


def test_an_empty_target_is_filled(convert, maxtext, tmp_path):
    code, _, err = convert(*of_maxtext(maxtext[0]), "--out", tmp_path)
    assert (code, err) == (0, "") and (tmp_path / "model.safetensors").exists()


def test_a_full_disk_is_one_line_and_nothing_is_left(convert, maxtext, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # bytes a file; the weights take more
    try:
        code, out, err = convert(*of_maxtext(maxtext[0]), "--out", tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert f"could not write the checkpoint new in {tmp_path}" in err and "bytes are free there" in err
    assert not any(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing_and_what_a_kill_leaves_is_no_obstacle(convert, maxtext, tmp_path, monkeypatch):
    def interrupted(model, folder, **options):
        save(model, folder, **options)
        assert (folder / "model.safetensors").exists() and not (tmp_path / "new").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        save = DCFormerForCausalLM.save_pretrained
        patch.setattr(DCFormerForCausalLM, "save_pretrained", interrupted)
        assert convert(*of_maxtext(maxtext[0]), "--out", tmp_path / "new")[0] == 130
    assert not any(tmp_path.iterdir())
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "model-00001-of-00002.safetensors").write_text("half")
    assert convert(*of_maxtext(maxtext[0]), "--out", tmp_path / "new")[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not list(tmp_path.glob("new/model-*"))
