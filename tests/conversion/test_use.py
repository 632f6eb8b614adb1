"""What one does with a model goes on working when it is converted; what does not fit is refused."""

import copy

import pytest
import torch
from small_models import generate, inputs, loud, make, outputs
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    CompileConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import dcformer
from dcformer.nn import Compose
from dcformer.testing import assert_within_budget


def converted(**options):
    return loud(dcformer.convert(make("llama", num_hidden_layers=1), **options))


def test_gradients_are_those_without_checkpointing():
    model, given = loud(dcformer.convert(make("llama"))).train(), inputs("llama")
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        model(**given, labels=given["input_ids"]).loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        if reentrant is None:
            expected = grads
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], msg=name)


def test_weights_and_hidden_states_come_out():
    model, ids = loud(dcformer.convert(make("llama"))), torch.randint(2, 96, (2, 9))
    made = model(ids, output_attentions=True, output_hidden_states=True)
    assert [tuple(a.shape) for a in made.attentions] == [(2, 4, 9, 9)] * 2
    assert len(made.hidden_states) == 3
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    torch.testing.assert_close(model(ids).attentions, made.attentions)


def test_bfloat16():
    model, given = make("llama").bfloat16(), inputs("llama")
    plain, exact = outputs(model, given), outputs(copy.deepcopy(model).double(), given)
    dcformer.convert(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_within_budget(outputs(model, given), plain, exact, 2)


@torch.no_grad()
def test_compiles_whole():
    model, given = converted(), inputs("llama")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**given).logits, model(**given).logits, atol=5e-5, rtol=1e-4)


def test_compiled_decoding_with_a_static_cache():
    model, given = converted(), inputs("llama")
    compile_config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compile_config._compile_all_devices = True  # transformers compiles by itself on GPUs only
    made = generate(model, given, cache_implementation="static", compile_config=compile_config)
    assert torch.equal(made, generate(model, given, use_cache=False))


def test_assisted_decoding_and_prompt_lookup():
    model, helper = loud(dcformer.convert(make("llama"))), loud(dcformer.convert(make("llama", num_hidden_layers=1), rank=1))
    ids = torch.randint(2, 96, (1, 9))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    greedy = generate(model, given, use_cache=False)
    assert torch.equal(generate(model, given, assistant_model=helper), greedy)
    assert torch.equal(generate(model, given, prompt_lookup_num_tokens=2), greedy)


def test_a_cache_is_handed_on_and_cut():
    model, ids = loud(dcformer.convert(make("llama"))), torch.randint(2, 96, (2, 9))
    logits = model(ids).logits
    cache = model(ids[:, :6], use_cache=True)["past_key_values"]
    cache.crop(-2)
    torch.testing.assert_close(model(ids[:, 4:], past_key_values=cache).logits, logits[:, 4:], atol=5e-5, rtol=1e-4)


def test_continuous_batching():
    model = loud(dcformer.convert(make("llama")))
    prompts = [torch.randint(2, 96, (length,)).tolist() for length in (3, 7, 5)]
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    made = model.generate_batch(prompts, generation_config=config)
    for prompt, result in zip(prompts, sorted(made.values(), key=lambda r: int(r.request_id.rpartition("_")[2])), strict=True):
        ids = torch.tensor([prompt])
        expected = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert result.generated_tokens == expected[0, len(prompt) :].tolist()
    assert model.config.head_dim == 12


def test_continuous_batching_of_unequal_widths_is_refused():
    for options in ({"post": False}, {"layers": ["model.layers.1"]}):
        model = dcformer.convert(make("llama"), **options)
        with pytest.raises(ValueError, match="continuous batching needs"):
            model.init_continuous_batching()


def test_only_chosen_layers_are_converted_and_only_composition_trains():
    model = dcformer.convert(make("llama"), layers=["model.layers.1"], trainable="composition")
    assert [name for name, m in model.named_modules() if isinstance(m, Compose)] == ["model.layers.1.self_attn.compose"]
    assert all(p.requires_grad == (".compose." in name) for name, p in model.named_parameters())
    everything = dcformer.convert(make("llama"), layers="model")
    assert sum(isinstance(module, Compose) for module in everything.modules()) == 2
    given = inputs("llama")
    loud(model).activation_checkpointing_enable()
    model.train()(**given, labels=given["input_ids"]).loss.backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)


def test_other_models_of_the_same_configuration_stay():
    config = make("llama").config
    one, other = LlamaForCausalLM(config), LlamaForCausalLM(config)
    dcformer.convert(one)
    assert other.config is config and type(config).__name__ == "LlamaConfig" and not hasattr(config, "composition")
    assert not any(isinstance(module, Compose) for module in other.modules())
    outputs(other, inputs("llama"))


def test_copies_are_independent():
    model, given = converted(), inputs("llama")
    twin = copy.deepcopy(model)
    assert torch.equal(outputs(twin, given), outputs(model, given))
    twin.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"
    dcformer.unconvert(twin)
    assert (outputs(twin, given) - outputs(model, given)).abs().max() > 1e-3


def test_the_trainer_trains_and_resumes(tmp_path):
    def trainer(steps):
        torch.manual_seed(0)
        model = dcformer.convert(make("gpt_neox"), trainable="composition")  # whose checkpoints have other names
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, 96, (8, 6))]
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, per_device_train_batch_size=2, learning_rate=0.1, report_to="none",
            disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=rows)

    whole = trainer(4)
    whole.train()
    again = trainer(4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, expected), got in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, msg=name)


def test_lora_beside_the_composition(tmp_path):
    peft = pytest.importorskip("peft")
    make("llama").save_pretrained(tmp_path / "base")
    base, given = LlamaForCausalLM.from_pretrained(tmp_path / "base"), inputs("llama")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["compose"], init_lora_weights=False)
    model = peft.get_peft_model(dcformer.convert(base), config)
    loud(model).save_pretrained(tmp_path / "lora")
    outputs(model, given).square().sum().backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"lora_A", "compose"} <= {part for name in learning for part in name.split(".")}
    again = dcformer.convert(LlamaForCausalLM.from_pretrained(tmp_path / "base"))
    again = peft.PeftModel.from_pretrained(again, tmp_path / "lora")
    torch.testing.assert_close(outputs(again, given), outputs(model, given), atol=5e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("bits", [4, 8])
def test_low_bits(tmp_path, monkeypatch, bits):
    """Equal to the whole model with the rounded weights; 8 bits of bitsandbytes round what is multiplied with them too."""
    pytest.importorskip("bitsandbytes")
    # Where the processor multiplies bfloat16, 4 bits are multiplied in it, and only in matrices larger than these.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    model, given = loud(dcformer.convert(make("llama", hidden_size=64, intermediate_size=64))), inputs("llama")
    model.save_pretrained(tmp_path)
    quantised = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, dtype=torch.float32)
    exact = outputs(model, given)
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight.copy_(small.get_submodule(name)(torch.eye(linear.in_features)).T)
    expected, got = outputs(model, given), outputs(small, given)
    assert (expected - exact).abs().max() > 1e-3
    assert (got - expected).norm() < (1e-4 if bits == 4 else 0.15) * expected.norm()


def test_layers_on_disk(tmp_path):
    model, given = loud(dcformer.convert(make("llama"))), inputs("llama")
    model.save_pretrained(tmp_path / "model")
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "lm_head": "cpu",
    }
    places["model.rotary_emb"] = "cpu"
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=places, offload_folder=tmp_path / "off")
    with torch.no_grad():
        torch.testing.assert_close(outputs(offloaded, given), outputs(model, given))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 5}, "rank=5 is over the 4 heads"),
        ({"rank": 3, "groups": 2}, "rank=3 is over the 2 heads"),
        ({"groups": 3, "rank": 1}, "groups=3 must divide"),
        ({"layers": ["model.layers.7"]}, r"'model.layers.7'; there is at layers.0.self_attn"),
        ({"layers": []}, r"layers=\[\] leaves nothing"),
        ({"pre": False, "post": False}, "nothing is mixed"),
        ({"rank": 0, "gates": False}, "nothing is mixed"),
        ({"trainable": "heads"}, "trainable='heads'"),
    ],
)
def test_options_that_do_not_fit_leave_the_model_alone(options, words):
    model, given = make("llama"), inputs("llama")
    before = outputs(model, given)
    with pytest.raises(ValueError, match=words):
        dcformer.convert(model, **options)
    assert type(model) is LlamaForCausalLM and torch.equal(outputs(model, given), before)
    assert not any(isinstance(m, Compose) for m in model.modules()) and model.config.model_type == "llama"


def test_wrong_use():
    model = make("llama")
    with pytest.raises(ValueError, match="is not converted"):
        dcformer.unconvert(model)
    with pytest.raises(ValueError, match=r"must be an nn.Module"):
        dcformer.convert("llama")
    dcformer.convert(model)
    with pytest.raises(ValueError, match="has composable heads already"):
        dcformer.convert(model)
    with pytest.raises(ValueError, match="'flash_attention_2' cannot compose heads"):
        model.set_attn_implementation("flash_attention_2")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention' cannot compose heads"):
        model.model.layers[0].self_attn(
            torch.randn(1, 3, 32), model.model.rotary_emb(torch.randn(1, 3, 32), torch.arange(3)[None])
        )
    ours = dcformer.DCFormerForCausalLM(dcformer.DCFormerConfig.from_size("1M", vocab_size=97))
    with pytest.raises(ValueError, match="composable heads already"):
        dcformer.convert(ours)
