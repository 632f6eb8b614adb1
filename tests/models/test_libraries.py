"""Training, quantised weights, packed batches, scaled positions and caches handed on, for both kinds of models."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    QuantoConfig,
    StaticCache,
    Trainer,
    TrainingArguments,
)

KINDS = ["dcformer", "dcpythia"]


def close(actual, expected, atol=2e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@pytest.fixture(params=KINDS)
def model(request, make):
    return make(request.param, compose={"static": True})


@torch.no_grad()
def check_greedy(model, sequence, new):
    """Each of the last tokens of [1, T] is the likeliest in one pass without a cache, up to ties."""
    logits = model(input_ids=sequence, use_cache=False).logits[:, -new - 1 : -1]
    close(logits.gather(2, sequence[:, -new:, None])[..., 0], logits.amax(-1))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_learns_and_its_checkpoint_loads(model, tokens, tmp_path, checkpointing):
    ids = tokens(4, 12)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=12, per_device_train_batch_size=4, learning_rate=3e-3, lr_scheduler_type="constant",
        activation_checkpointing=checkpointing, report_to=[], disable_tqdm=True, use_cpu=True, save_steps=12, logging_steps=12,
    )  # fmt: skip
    before = copy.deepcopy(model)
    Trainer(model, arguments, train_dataset=rows).train()
    model.eval()
    losses = [m(ids, labels=ids).loss.item() for m in (before, model)]
    assert losses[1] < 0.7 * losses[0]
    for (name, old), new in zip(before.named_parameters(), model.parameters(), strict=True):
        assert not torch.equal(old, new), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert torch.equal(loaded(ids).logits, model(ids).logits)


QUANTISED = {
    "bitsandbytes 8": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bitsandbytes 4": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "quanto 8": ("optimum.quanto", lambda: QuantoConfig(weights="int8")),
    "quanto 4": ("optimum.quanto", lambda: QuantoConfig(weights="int4")),
}


@torch.no_grad()
@pytest.mark.parametrize("how", QUANTISED)
def test_weights_of_8_and_4_bits(model, tokens, tmp_path, monkeypatch, how):
    """Equal to the whole model with the rounded weights; 8 bits of bitsandbytes round what is multiplied with them too."""
    library, config = QUANTISED[how]
    pytest.importorskip(library)
    if library == "bitsandbytes":
        # Where the processor multiplies bfloat16, 4 bits are multiplied in it, and only in matrices larger than these.
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    model.save_pretrained(tmp_path)
    small, ids = (
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config(), dtype=torch.float32),
        tokens(2, 20),
    )
    exact = model(ids).logits
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear):
            rounded = small.get_submodule(name)(torch.eye(linear.in_features))
            linear.weight.copy_((rounded - (0 if linear.bias is None else linear.bias)).T)
    logits, expected = small(ids).logits, model(ids).logits
    assert (expected - exact).abs().max() > 1e-3
    if how == "bitsandbytes 8":
        assert (logits - expected).norm() < 0.15 * expected.norm()
    else:
        close(logits, expected, atol=1e-4)
    attention = small.model.layers[0].self_attn
    assert type(attention.q_proj) is not torch.nn.Linear
    assert {p.dtype for p in attention.compose.parameters()} == {torch.float32}  # small, and all heads depend on them
    out = small.generate(
        ids, max_new_tokens=6, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    assert out.sequences.shape == (2, 26) and torch.stack(out.logits).isfinite().all()
    close(out.logits[0], small(ids, use_cache=False).logits[:, -1], atol=1e-4)


@torch.no_grad()
def test_the_flattening_collator_packs_rows(model, tokens):
    rows = [tokens(length) for length in (9, 1, 14)]
    packed = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": row.tolist()} for row in rows])
    logits = model(**{name: packed[name] for name in ("input_ids", "position_ids")}).logits[0]
    close(logits, torch.cat([model(row[None]).logits[0] for row in rows]))


@torch.no_grad()
def test_outputs_asked_for_in_the_configuration_and_as_a_tuple(model, tokens):
    ids = tokens(2, 8)
    model.set_attn_implementation("eager")
    asked = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)
    assert torch.equal(asked.hidden_states[-1], model.model(ids).last_hidden_state)
    flat = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False, return_dict=False)
    model.config.output_hidden_states = model.config.output_attentions = True
    configured = model(ids, use_cache=False)
    for given in (configured.to_tuple(), flat):
        for one, two in zip(
            (given[0], *given[1], *given[2]), (asked.logits, *asked.hidden_states, *asked.attentions), strict=True
        ):
            assert torch.equal(one, two)


@torch.no_grad()
def test_a_new_model_depends_on_the_seed_alone(model):
    pair = []
    for _ in range(2):
        torch.manual_seed(5)
        pair.append(AutoModelForCausalLM.from_config(copy.deepcopy(model.config)).state_dict())
    assert all(torch.equal(weight, pair[1][name]) for name, weight in pair[0].items())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn"])
def test_scaled_rotary_embeddings(make, tokens, kind, rope):
    plain = make(kind, max_position_embeddings=16)
    parameters = plain.config.rope_parameters | {"rope_type": rope, "factor": 4.0}
    scaled = make(kind, max_position_embeddings=16, rope_parameters=parameters)
    scaled.load_state_dict(plain.state_dict())
    short, long = tokens(1, 10), tokens(1, 24)
    assert torch.equal(scaled(short).logits, plain(short).logits) == (rope == "dynamic")  # which changes nothing before 16
    assert (scaled(long).logits - plain(long).logits).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_generation_goes_on_from_its_cache(model, tokens, static):
    ids = tokens(1, 12)
    settings = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    first = {"cache": StaticCache(config=model.config, max_cache_len=40)} if static else {}
    part = model.generate(ids, max_new_tokens=5, **settings, **first)
    seen = torch.ones_like(part.sequences)  # else a written 0 would be taken for padding
    out = model.generate(part.sequences, cache=part.cache, attention_mask=seen, max_new_tokens=5, **settings)
    assert out.sequences.shape == (1, 22)
    check_greedy(model, out.sequences, 10)


@torch.no_grad()
def test_sampling_depends_on_the_seed_and_not_on_the_cache(model, tokens):
    ids, drawn = tokens(1, 5), []
    for seed, use_cache in ((7, True), (7, False), (8, True)):
        torch.manual_seed(seed)
        drawn.append(model.generate(ids, max_new_tokens=12, do_sample=True, pad_token_id=0, use_cache=use_cache))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
