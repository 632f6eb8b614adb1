"""What other libraries do with a causal language model of transformers: ours do it too."""

import copy
import re

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

import dcformer.models.attention
from dcformer.ops import composed_attention

KINDS = ["dcformer", "dcpythia"]
BACKENDS = ["dc_cpu", "dc_chunked", "dc_reference"]


def close(actual, expected, atol=5e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@pytest.fixture
def saved(make, tmp_path):
    """A folder with a model and a tokenizer, and the model."""

    def save(kind):
        model = make(kind)
        model.save_pretrained(tmp_path)
        words = {"<unk>": 0} | {f"w{i}": i for i in range(1, model.config.vocab_size)}
        tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>", padding_side="left")
        wrapped.save_pretrained(tmp_path)
        return tmp_path, model

    return save


@pytest.fixture
def used(monkeypatch):
    """The backends that composed attention was asked for."""
    asked = []

    def record(*args, backend="auto", **kwargs):
        asked.append(backend)
        return composed_attention(*args, backend=backend, **kwargs)

    monkeypatch.setattr(dcformer.models.attention, "composed_attention", record)
    return asked


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_an_attention_implementation(saved, used, tokens, kind, name):
    folder, model = saved(kind)
    ids, mask = tokens(2, 20), torch.ones(2, 20)
    mask[0, :4] = 0
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
    model.set_attn_implementation(name)
    used.clear()
    for other in (loaded, model):
        close(other(ids, attention_mask=mask).logits[mask.bool()], expected)
    assert used == [name.removeprefix("dc_")] * 8


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_backend_serves_other_models_as_plain_attention(tokens, side):
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, slice(None, 4) if side == "left" else slice(-4, None)] = 0
    expected = model(ids, attention_mask=mask).logits
    for name in BACKENDS:
        model.set_attn_implementation(name)
        close(model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()])
    model.set_attn_implementation("dc_cpu")
    fast = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    assert fast.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0))


def test_what_composed_attention_does_not_have_is_refused(tokens):
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="softcap: composed attention does not have it"):
        dcformer.models.attention.composed_attention_forward(torch.nn.Module(), query, query, query, None, softcap=30.0)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["sdpa", "dc_chunked"])
def test_fast_implementations_give_the_composed_weights_where_asked(make, tokens, kind, name):
    model, ids = make(kind), tokens(2, 20)
    model.set_attn_implementation("eager")
    expected = model(ids, output_attentions=True)
    model.set_attn_implementation(name)
    out = model(ids, output_attentions=True, output_hidden_states=True)
    close(out.logits, expected.logits)
    for weights, others in zip(out.attentions, expected.attentions, strict=True):
        close(weights, others)
    assert [h.shape for h in out.hidden_states] == [(2, 20, 64)] * 5
    assert model(ids).attentions is None


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline(saved, kind):
    folder, model = saved(kind)
    prompts = ["w1 w2 w3 w4 w5 w6", "w9"]
    generator = pipeline("text-generation", model=str(folder), batch_size=2)
    texts = generator(prompts, max_new_tokens=5, do_sample=False, return_full_text=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, (text,) in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert text["generated_text"] == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_lora_beside_trainable_composition(make, tokens, tmp_path, kind):
    from peft import LoraConfig, PeftModel, get_peft_model

    base = make(kind)
    fresh = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["compose"], r=2))
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {re.search(r"lora_[AB]|dw1|qkw|dd", name)[0] for name in trainable} == {"lora_A", "lora_B", "dw1", "qkw", "dd"}
    before = {name: parameter.detach().clone() for name, parameter in trainable.items()}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    ids = tokens(2, 20)
    for _ in range(2):  # LoRA's A learns from the second step
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert all(not parameter.equal(before[name]) for name, parameter in trainable.items())
    model.eval().save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(fresh, tmp_path).eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        close(loaded(input_ids=ids).logits, expected, atol=0)
        close(loaded.merge_and_unload()(input_ids=ids).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_device_map_with_layers_on_disk(saved, tokens, tmp_path, kind):
    folder, model = saved(kind)
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": 3 * per_layer}, offload_folder=tmp_path / "offload"
    )
    assert "disk" in loaded.hf_device_map.values() and "cpu" in loaded.hf_device_map.values()
    ids = tokens(2, 12)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert loaded.generate(ids, **settings).equal(model.generate(ids, **settings))
