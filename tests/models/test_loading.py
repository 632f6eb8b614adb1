"""Saving, loading and the Auto classes, in fresh processes where it matters."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcformer import DCFormerConfig, DCFormerForCausalLM

LOAD_AND_COMPARE = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoConfig
assert AutoConfig.from_pretrained(sys.argv[1]).compose["rank"] == 3
io = load_file(sys.argv[1] + "/io.st")
with torch.no_grad():
    model = {model}.from_pretrained(sys.argv[1])
    assert not model.training and type(model).__name__ == "DCFormerForCausalLM", type(model)
    assert torch.equal(model(io["ids"]).logits, io["logits"]), "logits differ"
"""


def run(code, *arguments):
    command = [sys.executable, "-W", "error::UserWarning:dcformer", "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture
def saved(make, tokens, tmp_path):
    model, ids = make(compose={"static": True, "rank": 3}), tokens(2, 20)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, tmp_path / "io.st")
    return tmp_path


@pytest.mark.parametrize(
    ("imports", "model"),
    [
        # LlamaModel first: transformers then imports its Auto classes while its layers are only half imported.
        ("import dcformer; from transformers import LlamaModel, AutoModelForCausalLM", "AutoModelForCausalLM"),
        ("from transformers import AutoModelForCausalLM; import dcformer", "AutoModelForCausalLM"),
        ("import dcformer.models.dcformer.modeling_dcformer, dcformer", "dcformer.DCFormerForCausalLM"),
    ],
)
def test_a_new_process_loads_the_same_model(saved, imports, model):
    assert not list(saved.glob("*.bin")) and (saved / "model.safetensors").exists()
    run(imports + LOAD_AND_COMPARE.format(model=model), saved)


def test_the_operator_needs_no_transformers():
    run(
        "import sys; sys.modules['transformers'] = None\n"  # whoever imports it fails
        "import torch, dcformer\n"
        "x = torch.ones(1, 1, 2, 4)\n"
        "assert dcformer.composed_attention(x, x, x).shape == x.shape\n"
        "dcformer.Compose(8, 2)"
    )


def test_weights_a_checkpoint_lacks_are_drawn_as_in_a_new_model(saved):
    weights = load_file(saved / "model.safetensors")
    lost = [name for name in weights if ".compose." in name and ".layers.1." in name]
    save_file({name: w for name, w in weights.items() if name not in lost}, saved / "model.safetensors", {"format": "pt"})
    model = DCFormerForCausalLM.from_pretrained(saved)
    loaded = model.state_dict()
    for name, weight in weights.items():
        if name not in lost:
            assert torch.equal(loaded[name], weight), name
    compose = model.model.layers[1].self_attn.compose
    expected = {"dw1": (2 / (64 + 24)) ** 0.5, "qkw": 0.01 * 2 / (4 + 3) * (1 / 24) ** 0.5, "dd": 0.005 * (2 / (64 + 4)) ** 0.5}
    for name, std in expected.items():
        assert getattr(compose.dynamic, name).std().item() == pytest.approx(std, rel=0.2), name


def test_a_new_model_is_initialised_as_documented():
    model = DCFormerForCausalLM(DCFormerConfig.from_size("1M", vocab_size=500, initializer_range=0.03))
    layer = model.model.layers[0]
    for weight in (
        model.lm_head.weight,
        model.model.embed_tokens.weight,
        layer.self_attn.q_proj.weight,
        layer.mlp.up_proj.weight,
    ):
        assert weight.std().item() == pytest.approx(0.03, rel=0.05)
    assert (layer.input_layernorm.weight == 1).all()
    assert layer.self_attn.compose.dynamic.dw1.std().item() == pytest.approx((2 / (128 + 16)) ** 0.5, rel=0.05)


def test_buffers_are_right_straight_after_loading(saved):
    model = DCFormerForCausalLM.from_pretrained(saved)
    assert [name for name, _ in model.named_buffers()] == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    expected = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    for _, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_another_dtype(saved, dtype):
    model = DCFormerForCausalLM.from_pretrained(saved, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model(torch.ones(1, 5, dtype=torch.long)).logits.isfinite().all()


def test_unknown_keys_in_a_saved_configuration_are_named(saved):
    path = saved / "config.json"
    path.write_text(path.read_text().replace('"vocab_size"', '"n_layers": 3, "vocab_size"'))
    with pytest.raises(ValueError, match=r"unknown configuration keys \['n_layers'\]"):
        DCFormerForCausalLM.from_pretrained(saved)
