"""Full checkpoints and those of the composition alone: what is saved loads, or says why not."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, SHARED, inputs, loud, make, outputs
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils import logging

import dcformer

RELOAD = """
import sys, torch, transformers, dcformer
from small_models import FAMILIES, outputs
for folder in sys.argv[1:]:
    given = torch.load(f"{folder}/given.pt")
    auto = getattr(transformers, FAMILIES[folder.rpartition("/")[2]][0])
    model, found = auto.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"], (folder, found)
    torch.save(outputs(model, given), f"{folder}/out.pt")
"""


@torch.no_grad()
def test_checkpoints_reload_in_a_fresh_process(tmp_path):
    """Full ones of every family, and the composition of one alone."""
    models = {}
    for family in FAMILIES:
        layers = {"llama": ["model.layers.1"], "gpt2": ["h.0.attn"]}.get(family)
        models[family] = loud(dcformer.convert(make(family), groups=2, rank=1, layers=layers))
        models[family].save_pretrained(tmp_path / family)
    make("llama").save_pretrained(tmp_path / "base")
    alone = loud(dcformer.convert(LlamaForCausalLM.from_pretrained(tmp_path / "base"), trainable="composition"))
    models["alone/llama"] = alone
    alone.save_pretrained(tmp_path / "alone/llama", adapter_only=True)
    for name in models:
        torch.save(inputs(name.rpartition("/")[2]), tmp_path / name / "given.pt")
    folders = [str(tmp_path / name) for name in models]
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    subprocess.run([sys.executable, "-c", RELOAD, *folders], check=True, env=os.environ | {"PYTHONPATH": path})
    for family, model in models.items():
        given, out = (torch.load(tmp_path / family / name) for name in ("given.pt", "out.pt"))
        torch.testing.assert_close(out, outputs(model, given), atol=5e-5, rtol=1e-4, msg=family)


def test_names_in_the_file_are_the_base_models(tmp_path):
    """GPT-NeoX renames its head between file and model; a converted one has to as well."""
    model = make("gpt_neox")
    model.save_pretrained(tmp_path / "base")
    dcformer.convert(model).save_pretrained(tmp_path / "converted")
    base, converted = (set(safe_open(tmp_path / name / "model.safetensors", "pt").keys()) for name in ("base", "converted"))
    assert base == {name for name in converted if ".compose." not in name}


def test_parts_of_the_model_reload(tmp_path):
    model, given = loud(dcformer.convert(make("llama"), layers=["model.layers.1"])), inputs("llama")
    model.model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)(**given).last_hidden_state
    torch.testing.assert_close(again, model.model(**given).last_hidden_state)


def test_part_of_a_pair_of_towers_is_not_saved_alone(tmp_path):
    model = dcformer.convert(make("clip"))
    with pytest.raises(ValueError, match="part of a converted model"):
        model.text_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="part of a converted model"):
        dcformer.unconvert(model.text_model)


def test_a_checkpoint_without_composition_weights_is_refused(tmp_path):
    dcformer.convert(make("llama")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if ".compose." not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks composition weights: model.layers.0.self_attn.compose"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_the_base_models_class_says_what_it_leaves_out(tmp_path, monkeypatch):
    dcformer.convert(make("llama")).save_pretrained(tmp_path)
    said = []
    monkeypatch.setattr(logging.get_logger("transformers.modeling_utils"), "warning", lambda text, *_: said.append(text))
    LlamaForCausalLM.from_pretrained(tmp_path)
    assert any("dw1" in text for text in said)


def test_a_new_model_of_the_converted_configuration_is_converted():
    model = dcformer.convert(make("llama"), rank=1)
    assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)


@pytest.fixture
def adapter(tmp_path):
    """A model with composition of its own that was saved alone, and the folder."""
    make("llama").save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    loud(dcformer.convert(model, trainable="composition", rank=1))
    model.save_pretrained(tmp_path / "adapter", adapter_only=True)
    return model, tmp_path / "adapter"


def test_the_composition_alone_reloads(adapter, tmp_path):
    model, folder = adapter
    given = inputs("llama")
    assert {path.name for path in folder.iterdir()} == {"config.json", "composition.safetensors"}
    again, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(again) is type(model) and not found["missing_keys"] and not found["unexpected_keys"]
    assert torch.equal(outputs(again, given), outputs(model, given))
    assert all(p.requires_grad == (".compose." in name) for name, p in again.named_parameters())
    assert again.config.base_model_name_or_path is None
    again.save_pretrained(tmp_path / "again", adapter_only=True)
    again.save_pretrained(tmp_path / "full")
    for name in ("again", "full"):
        third = AutoModelForCausalLM.from_pretrained(tmp_path / name, attn_implementation="eager")
        assert third.config._attn_implementation == "eager"
        torch.testing.assert_close(outputs(third, given), outputs(model, given), atol=5e-5, rtol=1e-4)
    hidden = AutoModel.from_pretrained(folder)(**given).last_hidden_state
    torch.testing.assert_close(hidden, model.model(**given).last_hidden_state)


def test_the_base_models_revision_is_kept(adapter, monkeypatch):
    model, folder = adapter
    model.base_model_revision = "abc"
    model.save_pretrained(folder, adapter_only=True)
    asked, load = {}, LlamaForCausalLM.from_pretrained.__func__

    def record(cls, *args, **kwargs):
        asked.update(kwargs)
        return load(cls, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(record))
    again = AutoModelForCausalLM.from_pretrained(folder, revision="of-the-composition")
    assert asked["revision"] == again.base_model_revision == "abc"


def test_the_composition_alone_is_not_offloaded(adapter, tmp_path):
    _, folder = adapter
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(ValueError, match="device_map leaves no place"):
        AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "off")


def test_the_base_alone_is_never_loaded_in_its_place(adapter, tmp_path):
    _, folder = adapter
    with pytest.raises(OSError, match="no file named"):
        LlamaForCausalLM.from_pretrained(folder)
    make("llama", hidden_size=64).save_pretrained(tmp_path / "base")
    with pytest.raises((ValueError, RuntimeError), match=r"shape|mismatch"):
        AutoModelForCausalLM.from_pretrained(folder)
    (folder / "composition.safetensors").unlink()
    with pytest.raises(OSError, match=r"composition.safetensors"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_composition_of_another_shape_is_refused(adapter):
    _, folder = adapter
    config = json.loads((folder / "config.json").read_text())
    config["composition"]["layers"] = ["layers.1"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not fit the base model: layers.0.self_attn.compose"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_the_composition_alone_needs_an_untrained_base_from_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="loaded from a checkpoint"):
        dcformer.convert(make("llama"), trainable="composition").save_pretrained(tmp_path / "a", adapter_only=True)
    make("llama").save_pretrained(tmp_path / "base")
    model = dcformer.convert(LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    with pytest.raises(ValueError, match="trainable='composition'"):
        model.save_pretrained(tmp_path / "b", adapter_only=True)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_head_that_the_base_checkpoint_lacks_is_not_left_out(tmp_path):
    make("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    dcformer.convert(model, trainable="composition").save_pretrained(tmp_path / "adapter", adapter_only=True)
    with pytest.raises(ValueError, match=r"lacks weights of the base model: score.weight"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter")


def test_options_of_saving_that_would_be_ignored_are_refused(adapter, tmp_path):
    model, _ = adapter
    with pytest.raises(ValueError, match="adapter_only=True takes no other options, such as state_dict"):
        model.save_pretrained(tmp_path / "again", adapter_only=True, state_dict=model.state_dict())


def test_code_that_came_with_its_checkpoint_is_not_saved(tmp_path):
    """`AutoModel` would load what `auto_map` names: the base model alone."""

    class TheirConfig(LlamaConfig):
        model_type = "theirs"

    class Theirs(LlamaForCausalLM):
        config_class = TheirConfig

    config = TheirConfig(**SHARED, auto_map={"AutoModelForCausalLM": "modeling.Theirs"})
    with pytest.raises(ValueError, match=r"came with its checkpoint"):
        dcformer.convert(Theirs(config)).save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
