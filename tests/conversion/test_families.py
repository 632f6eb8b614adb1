"""Every family: the same outputs at first, trainable, any cache, and back again."""

import pytest
import torch
import transformers
from small_models import CAUSAL, DECODERS, FAMILIES, GENERATING, MIXED, generate, inputs, loud, make, outputs
from transformers import AutoConfig

import dcformer
from dcformer.nn import Compose


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay_the_same_and_come_back(family):
    model, given = make(family), inputs(family)
    config, kind, attention, before = model.config, type(model), model.config._attn_implementation, outputs(model, given)
    unpadded = {name: value for name, value in given.items() if name != "attention_mask"}
    whole = outputs(model, unpadded)
    assert dcformer.convert(model) is model
    torch.testing.assert_close(outputs(model, given), before, atol=2e-5, rtol=0)
    torch.testing.assert_close(outputs(model, unpadded), whole, atol=2e-5, rtol=0)
    assert isinstance(model, kind) and isinstance(model.config, type(config))
    loud(model)
    changed = outputs(model, given)
    assert (changed - before).abs().max() > 1e-2
    model.set_attn_implementation("eager")
    torch.testing.assert_close(outputs(model, given), changed, atol=5e-5, rtol=1e-4)
    for name in ("dc_reference", "dc_chunked", "sdpa"):
        if attention == "eager":  # the family has no other
            with pytest.raises(ValueError, match="does not support"):
                model.set_attn_implementation(name)
        else:
            model.set_attn_implementation(name)
            torch.testing.assert_close(outputs(model, given), changed, atol=5e-5, rtol=1e-4, msg=name)
    model.set_attn_implementation(attention)
    dcformer.unconvert(model)
    assert type(model) is kind and type(model.config) is type(config) and model.config.to_dict() == config.to_dict()
    assert model.config._attn_implementation == attention
    assert torch.equal(outputs(model, given), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_move_every_composition(family):
    model, given = dcformer.convert(make(family), static=True, trainable="composition").train(), inputs(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert before and all(".compose." in name for name in before)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    weights = torch.randn_like(outputs(model, given))
    for step in range(3):
        optimizer.zero_grad()
        (outputs(model, given) * weights).sum().backward()
        for name in before:  # what stands behind the zero factor waits for the second step
            assert model.get_parameter(name).grad.any() or (step == 0 and name.endswith("dw1")), (step, name)
        optimizer.step()
    for name, parameter in before.items():
        assert not torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("family", GENERATING)
def test_every_cache_gives_the_text_that_no_cache_gives(family):
    model, given = loud(dcformer.convert(make(family))), inputs(family)
    greedy = generate(model, given, use_cache=False)
    assert torch.equal(generate(model, given), greedy)
    assert torch.equal(generate(model, given, cache_implementation="static"), greedy)
    if family in DECODERS:
        assert torch.equal(generate(model, given, prefill_chunk_size=4), greedy)
    beams = generate(model, given, num_beams=2, use_cache=False)
    assert torch.equal(generate(model, given, num_beams=2), beams)


@pytest.mark.parametrize("family", DECODERS)
def test_padding_is_not_seen(family):
    model, given = loud(dcformer.convert(make(family))), inputs(family)
    mask = given["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(**given, position_ids=positions).logits
    alone = model(given["input_ids"][:1, 3:]).logits[0]
    torch.testing.assert_close(logits[0, 3:], alone, atol=5e-5, rtol=1e-4)


def test_cross_attention_takes_the_key_side_from_the_encoder():
    model, given = loud(dcformer.convert(make("t5"), layers=["decoder.block.1.layer.1"], query_wise=False)), inputs("t5")
    assert [name for name, m in model.named_modules() if isinstance(m, Compose)] == [
        "decoder.block.1.layer.1.EncDecAttention.compose"
    ]
    seen = []
    compose = model.decoder.block[1].layer[1].EncDecAttention.compose
    compose.register_forward_pre_hook(lambda module, args: seen.append(args))
    encoded = model.encoder(given["input_ids"], given["attention_mask"]).last_hidden_state
    model(**given)
    ((hidden, keys),) = seen
    assert hidden.shape[1] == 5
    torch.testing.assert_close(keys, encoded)


@pytest.mark.parametrize("family", ["bloom", "deberta-v2"])
def test_attention_of_its_own_is_refused(family):
    config = AutoConfig.for_model(family, vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.AutoModel.from_config(config)
    kind = type(model)
    with pytest.raises(ValueError, match="does not go through transformers' attention interface"):
        dcformer.convert(model)
    assert type(model) is kind


LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10}
REUSE = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2}


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("diffllama", {}, "attends more than once"),
        ("gemma4_text", {**REUSE, "num_hidden_layers": 4, "layer_types": 2 * MIXED["layer_types"]}, "shared_kv_states"),
        ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2}, "compressed keys"),
    ],
)
def test_attention_to_other_keys_than_its_own_is_refused(family, options, words):
    """Their caches hold what is no key of the layer, which took the mixing weights of other positions or heads."""
    model = transformers.AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**CAUSAL, **options}))
    kind = type(model)
    with pytest.raises(ValueError, match=words):
        dcformer.convert(model)
    assert type(model) is kind
