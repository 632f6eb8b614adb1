import copy
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CompileConfig

import dcformer
from dcformer.nn import Compose
from dcformer.testing import assert_within_budget

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHARED = {"num_key_value_heads": 2, "head_dim": 12}
FAMILIES = {
    "llama": SHARED,
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": SHARED,
    "mistral": {**SHARED, "sliding_window": 6},
    "olmo2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2, "sliding_window": 6},
    "gpt_neox": {},
    "gpt2": {},
}
LENGTH = 11


def make(family, **options):
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **options})
    return AutoModelForCausalLM.from_config(config).eval()


def loud(model):
    """Composition that changes the outputs: at the identity a mistake would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compose." in name:
                parameter.normal_(0, 0.2)
    return model


def tokens(rows=2):
    return torch.randint(1, VOCAB, (rows, LENGTH))


def generate(model, ids, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay_the_same_and_come_back(family):
    model, ids = make(family), tokens()
    kind, config_kind, attention = type(model), type(model.config), model.config._attn_implementation
    logits, text = model(ids).logits, generate(model, ids)
    assert dcformer.convert(model) is model
    torch.testing.assert_close(model(ids).logits, logits, atol=2e-5, rtol=0)
    assert torch.equal(generate(model, ids), text)
    assert isinstance(model, kind) and isinstance(model.config, config_kind)
    loud(model)
    assert (model(ids).logits - logits).abs().max() > 1e-2
    assert dcformer.unconvert(model) is model
    assert type(model) is kind and type(model.config) is config_kind
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_cache_gives_the_text_that_no_cache_gives(family):
    model, ids = loud(dcformer.convert(make(family))), tokens()
    greedy = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids), greedy)
    assert torch.equal(generate(model, ids, cache_implementation="static"), greedy)
    assert torch.equal(generate(model, ids, prefill_chunk_size=4), greedy)
    beams = generate(model, ids, num_beams=3, use_cache=False)
    assert torch.equal(generate(model, ids, num_beams=3), beams)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_is_not_seen(family):
    model, ids = loud(dcformer.convert(make(family))), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(logits[0, 4:], model(ids[:1, 4:]).logits[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_move_every_parameter(family):
    model, ids = dcformer.convert(make(family), static=True).train(), tokens()
    model.activation_checkpointing_enable()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(3):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        if step == 0:  # what stands behind the zero factor waits
            still = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
            assert {name.rsplit(".", 1)[1] for name in still} <= {"dw1"}
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_gradients_are_those_without_checkpointing():
    model, ids = loud(dcformer.convert(make("llama"))).train(), tokens()
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        if reentrant is None:
            expected = grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], msg=name)


def test_backends_agree_and_weights_come_out():
    model, ids = loud(dcformer.convert(make("llama"))), tokens()
    logits = model(ids).logits
    for name in ("eager", "dc_reference", "dc_chunked", "sdpa"):
        model.set_attn_implementation(name)
        torch.testing.assert_close(model(ids).logits, logits, atol=2e-5, rtol=0)
    model.set_attn_implementation("eager")
    outputs = model(ids, output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in outputs.attentions] == [(2, 4, LENGTH, LENGTH)] * 2
    assert len(outputs.hidden_states) == 3


def test_bfloat16():
    model, ids = make("llama").bfloat16(), tokens()
    plain, exact = model(ids).logits, copy.deepcopy(model).double()(ids).logits
    dcformer.convert(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_within_budget(model(ids).logits, plain, exact, 2)


@torch.no_grad()
def test_compiles_whole():
    model, ids = loud(dcformer.convert(make("llama", num_hidden_layers=1))), tokens()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=2e-5, rtol=0)


def test_compiled_decoding_with_a_static_cache():
    model, ids = loud(dcformer.convert(make("llama", num_hidden_layers=1))), tokens()
    compile_config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compile_config._compile_all_devices = True  # transformers compiles by itself on GPUs only
    made = generate(model, ids, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(made, generate(model, ids, use_cache=False))


RELOAD = """
import sys, torch, dcformer
from transformers import AutoModel, AutoModelForCausalLM
for folder in sys.argv[1:]:
    ids, logits, hidden = torch.load(f"{folder}/expected.pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model(ids).logits, logits), folder
    assert torch.equal(AutoModel.from_pretrained(folder)(ids).last_hidden_state, hidden), folder
"""


def test_reloads_in_a_fresh_process(tmp_path):
    for family in FAMILIES:
        model, ids = loud(dcformer.convert(make(family), groups=2, rank=1, layers=LAYERS.get(family))), tokens()
        folder = tmp_path / family
        model.save_pretrained(folder)
        torch.save((ids, model(ids).logits, model.base_model(ids).last_hidden_state), folder / "expected.pt")
    subprocess.run([sys.executable, "-c", RELOAD, *map(str, tmp_path.iterdir())], check=True)


LAYERS = {"llama": ["model.layers.1"], "gpt2": ["h.0.attn"]}


def test_names_in_the_file_are_the_base_models(tmp_path):
    """GPT-NeoX renames its head between file and model; a converted one has to as well."""
    from safetensors import safe_open

    model = make("gpt_neox")
    model.save_pretrained(tmp_path / "base")
    dcformer.convert(model).save_pretrained(tmp_path / "converted")
    base, converted = (set(safe_open(tmp_path / name / "model.safetensors", "pt").keys()) for name in ("base", "converted"))
    assert base == {name for name in converted if ".compose." not in name}


def test_parts_of_the_model_reload(tmp_path):
    model, ids = loud(dcformer.convert(make("llama"), layers=["model.layers.1"])), tokens()
    model.model.save_pretrained(tmp_path)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_only_chosen_layers_are_converted_and_only_composition_trains():
    model = dcformer.convert(make("llama"), layers=["model.layers.1"], trainable="composition")
    assert [name for name, m in model.named_modules() if isinstance(m, Compose)] == ["model.layers.1.self_attn.compose"]
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if ".compose." in name
    }
    ids = tokens()
    loud(model).activation_checkpointing_enable()
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


def test_wrong_use():
    model = make("llama")
    for options, words in (
        ({"rank": 5}, "rank=5 is over the 4 heads"),
        ({"rank": 3, "groups": 2}, "rank=3 is over the 2 heads"),
        ({"groups": 3, "rank": 1}, "groups=3 must divide"),
        ({"layers": ["model.layers.7"]}, r"'model.layers.7'; there is at layers.0.self_attn"),
        ({"trainable": "heads"}, "trainable='heads'"),
    ):
        with pytest.raises(ValueError, match=words):
            dcformer.convert(model, **options)
        assert not any(isinstance(m, Compose) for m in model.modules())
    with pytest.raises(ValueError, match="is not converted"):
        dcformer.unconvert(model)
    dcformer.convert(model)
    with pytest.raises(ValueError, match="has composable heads already"):
        dcformer.convert(model)
    with pytest.raises(ValueError, match="'flash_attention_2' cannot compose heads"):
        model.set_attn_implementation("flash_attention_2")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="would leave out the composition"):
        model(tokens())
