"""What transformers tests of each of its own models: configuration, saving and loading, outputs, embeddings, generation."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

pytestmark = pytest.mark.parametrize("kind", ["dcformer", "dcpythia"])
GREEDY = {"do_sample": False, "pad_token_id": 0}


def close(actual, expected, atol=5e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def same(model, other):
    state, others = model.state_dict(), other.state_dict()
    return state.keys() == others.keys() and all(tensor.equal(others[name]) for name, tensor in state.items())


def test_configurations_come_back_from_json_folder_and_subfolder(make, tmp_path, kind):
    config = make(kind, compose={"rank": 1, "static": True}, eos_token_id=[3, 4], tie_word_embeddings=True).config
    assert type(config).from_dict(json.loads(config.to_json_string())).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "inner")
    for loaded in (AutoConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path, subfolder="inner")):
        assert type(loaded) is type(config) and loaded.to_json_string() == config.to_json_string()
    assert type(config)().hidden_size > 0 and type(config)(num_labels=5).num_labels == 5


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["50KB", "1GB"])
def test_saved_and_loaded(make, tmp_path, kind, tied, shard):
    model = make(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or shard == "1GB"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and same(loaded, model)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied


def test_the_decoder_alone_comes_from_a_whole_model_and_the_other_way_round(make, tmp_path, kind):
    model = make(kind)
    model.save_pretrained(tmp_path / "whole")
    decoder = AutoModel.from_pretrained(tmp_path / "whole")
    assert same(decoder, model.model)
    decoder.save_pretrained(tmp_path / "decoder")
    whole, found = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", output_loading_info=True)
    assert same(whole.model, model.model) and set(found["missing_keys"]) == {"lm_head.weight"}


def test_mismatched_sizes_are_an_error_unless_allowed(make, tmp_path, kind):
    model = make(kind)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=50)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, vocab_size=50, ignore_mismatched_sizes=True)
    assert loaded.lm_head.weight.shape == (50, 64) and same(loaded.model.layers, model.model.layers)


def test_a_missing_shard_is_an_error(make, tmp_path, kind):
    make(kind).save_pretrained(tmp_path, max_shard_size="50KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(OSError, match="safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [80, 110])
def test_embeddings_are_resized(make, tokens, kind, tied, size):
    model, ids = make(kind, tie_word_embeddings=tied), tokens(2, 10) % 80
    before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    after = model(ids).logits
    assert model.config.vocab_size == size and after.shape == (2, 10, size)
    close(after[..., :80], before[..., :80])
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied


@torch.no_grad()
def test_outputs_as_tuple_and_as_dictionary(make, tokens, kind):
    model, ids = make(kind), tokens(2, 10)
    asked = {"labels": ids, "output_hidden_states": True, "output_attentions": True, "use_cache": False}
    named, plain = model(ids, **asked), model(ids, return_dict=False, **asked)
    assert list(named) == ["loss", "logits", "hidden_states", "attentions"]
    close(plain[0], named.loss)
    close(plain[1], named.logits)
    for i, name in ((2, "hidden_states"), (3, "attentions")):
        for one, other in zip(plain[i], named[name], strict=True):
            close(one, other)
    hidden = named.hidden_states
    close(hidden[0], model.get_input_embeddings()(ids))
    close(model.lm_head(hidden[-1]), named.logits)
    model.set_attn_implementation("eager")  # the only one for which transformers lets the configuration ask for weights
    config = model.config
    config.output_hidden_states, config.output_attentions = True, True
    out = model(ids)
    assert len(out.hidden_states) == 5 and len(out.attentions) == 4


def test_hidden_states_and_weights_have_gradients(make, tokens, kind):
    out = make(kind)(tokens(2, 10), output_hidden_states=True, output_attentions=True)
    for kept in (out.hidden_states[1], out.attentions[1]):
        kept.retain_grad()
    out.logits[0, -1].sum().backward()
    assert out.hidden_states[1].grad.abs().sum() > 0 and out.attentions[1].grad.abs().sum() > 0


@torch.no_grad()
def test_a_row_does_not_change_with_its_batch(make, tokens, kind):
    model, ids = make(kind), tokens(5, 12)
    together = model(ids).logits
    for i in range(5):
        close(model(ids[i : i + 1]).logits[0], together[i])


@torch.no_grad()
def test_packed_documents_by_position_ids(make, tokens, kind):
    model, ids = make(kind), tokens(1, 20)
    positions = torch.cat([torch.arange(11), torch.arange(9)])[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    close(packed, torch.cat([model(part).logits for part in ids.split([11, 9], dim=1)], dim=1))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(make, tokens, kind, side):
    model, ids, pads = make(kind), tokens(3, 20), [0, 4, 11]
    mask = torch.arange(20) >= torch.tensor(pads)[:, None]
    mask = (mask if side == "left" else mask.flip(1)).long()
    logits = model(ids, attention_mask=mask).logits
    for i, pad in enumerate(pads):
        seen = slice(pad, None) if side == "left" else slice(None, 20 - pad)
        close(logits[i, seen], model(ids[i : i + 1, seen]).logits[0])


def test_gradient_checkpointing(make, tokens, kind):
    model, ids = make(kind).train(), tokens(2, 12)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.model.gradient_checkpointing
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        close(grads[1][name], grad)


@torch.no_grad()
def test_generation_from_embeddings_equals_that_from_tokens(make, tokens, kind):
    model, ids = make(kind), tokens(2, 12)
    expected = model.generate(ids, max_new_tokens=6, **GREEDY)
    embedded = model.get_input_embeddings()(ids)
    assert model.generate(inputs_embeds=embedded, max_new_tokens=6, **GREEDY).equal(expected[:, 12:])
    assert model.generate(ids, inputs_embeds=embedded, max_new_tokens=6, **GREEDY).equal(expected)


@torch.no_grad()
def test_generation_goes_on_from_a_cache(make, tokens, kind):
    model, ids = make(kind), tokens(2, 12)
    expected = model.generate(ids, max_new_tokens=10, **GREEDY)
    first = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
    given = {"attention_mask": torch.ones_like(first.sequences), "cache": first.cache}  # a written 0 is no padding
    assert model.generate(first.sequences, max_new_tokens=6, **given, **GREEDY).equal(expected)


@torch.no_grad()
def test_generation_returns_what_it_is_asked_for(make, tokens, kind):
    out = make(kind).generate(
        tokens(2, 12), max_new_tokens=5, return_dict_in_generate=True, output_scores=True, output_attentions=True,
        output_hidden_states=True, **GREEDY,
    )  # fmt: skip
    assert len(out.scores) == len(out.attentions) == len(out.hidden_states) == 5
    assert [w.shape for w in out.attentions[1]] == [(2, 4, 1, 8), (2, 4, 1, 13)] * 2
    assert [h.shape for h in out.hidden_states[1]] == [(2, 1, 64)] * 5


@torch.no_grad()
def test_beam_samples_and_returned_sequences(make, tokens, kind):
    model, ids = make(kind), tokens(2, 12)
    out = model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=True, num_return_sequences=2, pad_token_id=0)
    assert out.shape == (4, 17) and out[:, :12].equal(ids.repeat_interleave(2, dim=0))
