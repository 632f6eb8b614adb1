"""`dcformer convert`: what it writes, and what it says and leaves where that fails."""

import json
import resource
import shutil

import maxtext_by_hand
import pytest
import torch
from maxtext_by_hand import D, E, N, V, logits, nested, tree
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dcformer import DCFormerForCausalLM, DCPythiaForCausalLM
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


@pytest.fixture(params=[DCFormerForCausalLM, DCPythiaForCausalLM])
def ours(request, tmp_path):
    """A checkpoint of ours with a tokenizer."""
    keys = {name: value for name, value in CONFIG.items() if name != "model_type"}
    keys |= {"num_attention_heads": E // D}  # the released format has no other head dim
    model = request.param(request.param.config_class(**keys))
    model.save_pretrained(tmp_path / "ours")
    vocabulary = {f"word{number}": number for number in range(V)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages }}").save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


def test_there_and_back_again_is_bit_exact(convert, ours, tmp_path):
    assert convert(ours, "--from", "hf", "--to", "released", "--out", tmp_path / "theirs")[0] == 0
    config, weights = (
        json.loads((tmp_path / "theirs/config.json").read_text()),
        load_file(tmp_path / "theirs/model.safetensors"),
    )
    assert (config["dim"], config["n_layer"], config["window_size"]) == (E, 4, 3)
    assert not {"hidden_size", "num_hidden_layers"} & config.keys()
    assert {"tok_embeddings.weight", "layers.3.attention.wqkv.weight", "layers.0.attention.dyn_w_proj.dw1"} <= weights.keys()
    assert not [name for name in weights if name.startswith(("model.", "lm_head"))]
    assert convert(tmp_path / "theirs", "--from", "released", "--to", "hf", "--out", tmp_path / "back")[0] == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (ours, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for folder in (ours, tmp_path / "theirs", tmp_path / "back"):
        assert AutoTokenizer.from_pretrained(folder).decode([3, 1]) == "word3 word1"
        assert (folder / "chat_template.jinja").exists()
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_maxtext_checkpoint_becomes_a_released_one(convert, tmp_path, monkeypatch):
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="the extra maxtext is not installed")
    monkeypatch.setattr(maxtext_by_hand, "N", E // D)
    parameters, ids = tree(2, 2, kv_heads=E // D), torch.randint(V, (2, 9))
    checkpoint.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "state", {"params": nested(parameters)})
    released = {"dim": E, "n_head": E // D, "n_layer": 4, "intermediate_size": 40, "vocab_size": V, "window_size": 3}
    released |= {"use_qk_norm": True, "norm_eps": 1e-6, "model_type": "dcformer"}
    (tmp_path / "config.json").write_text(json.dumps(released))
    options = ("--from", "maxtext", "--config", tmp_path / "config.json")
    assert convert(tmp_path / "state", *options, "--to", "released", "--out", tmp_path / "theirs")[0] == 0
    written = json.loads((tmp_path / "theirs/config.json").read_text())
    assert released.items() <= written.items()
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")(ids).logits
    torch.testing.assert_close(theirs, logits(parameters, ids, [3, None], eps=1e-6), atol=1e-4, rtol=1e-4)


def _shards(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def _rename(before, after):
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        weights[after] = weights.pop(before)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


def _reconfigure(**changes):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: _shards(folder)[1].unlink(), "model-00002-of-"),
        (lambda folder: _shards(folder)[1].write_bytes(b"half"), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (_rename("model.norm.weight", "model.nrm.weight"), "lacks weights: model.norm.weight"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").unlink(), "say --from maxtext"),
        (_reconfigure(model_type="llama"), "model_type='llama'"),
        (_reconfigure(num_hidden_layers=3), "no place for: model.layers.3."),
        (_reconfigure(num_hidden_layers=5), "lacks weights: model.layers.4."),
        (_reconfigure(vocab_size=V + 1), f"lm_head.weight [{V}, {E}] in place of [{V + 1}, {E}]"),
        (_reconfigure(num_haeds=1), "num_haeds"),
    ],
)
def test_a_checkpoint_that_is_no_good_is_one_line_and_nothing_is_written(convert, ours, tmp_path, change, named):
    change(ours)
    code, out, err = convert(ours, "--from", "hf", "--to", "released", "--out", tmp_path / "new")
    assert (code, out) == (1, "")
    assert err.startswith("dcformer: ") and err.count("\n") == 1 and named in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_the_other_format_is_named(convert, ours, tmp_path):
    assert convert(ours, "--from", "hf", "--to", "released", "--out", tmp_path / "theirs")[0] == 0
    for source, wrong, right in ((ours, "released", "hf"), (tmp_path / "theirs", "hf", "released")):
        code, _, err = convert(source, "--from", wrong, "--to", "hf", "--out", tmp_path / "new")
        assert code == 1 and f"{source} is not in the format '{wrong}'; say --from {right}" in err
    assert convert(ours, "--from", "maxtext", "--to", "hf", "--out", tmp_path / "new")[0] == 2
    assert convert(ours, "--from", "hf", "--to", "hf", "--config", ours / "config.json", "--out", tmp_path / "new")[0] == 2
    assert not (tmp_path / "new").exists()


def test_what_the_released_format_cannot_say_is_refused(convert, tmp_path):
    keys = {name: value for name, value in CONFIG.items() if name != "model_type"}
    model = DCFormerForCausalLM(DCFormerForCausalLM.config_class(**keys))  # its head dim is not E / N
    model.save_pretrained(tmp_path / "ours")
    code, _, err = convert(tmp_path / "ours", "--from", "hf", "--to", "released", "--out", tmp_path / "new")
    assert code == 1 and "head_dim=8" in err
    assert not (tmp_path / "new").exists()
