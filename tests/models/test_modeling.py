"""One forward or backward pass without a cache."""

import copy

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

import dcformer.models.attention
from dcformer import Compose, DCFormerConfig, DCFormerForCausalLM

ABLATIONS = [
    {},
    {"static": True, "groups": 2},
    {"query_wise": False},
    {"key_wise": False, "gates": False},
    {"pre": False},
    {"post": False, "rank": 1},
    {"rank": 0},
]


def close(actual, expected, atol=2e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("compose", ABLATIONS, ids=str)
def test_every_parameter_learns_from_the_first_step(compose, tokens):
    config = DCFormerConfig.from_size("1M", vocab_size=97, num_hidden_layers=2, qk_norm=True, compose=compose)
    model = DCFormerForCausalLM(config).train()
    ids = tokens(2, 20)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


@torch.no_grad()
def test_composition_at_identity_is_the_plain_baseline(make, tokens):
    composed, plain = make(compose={"static": True}), make(compose=None)
    for module in composed.modules():
        if isinstance(module, Compose):
            module.reset_to_identity()
    assert plain.load_state_dict(composed.state_dict(), strict=False).missing_keys == []
    ids, mask = tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    close(composed(ids).logits, plain(ids).logits)
    mask[1, :12] = 0
    seen = mask.bool()
    close(composed(ids, attention_mask=mask).logits[seen], plain(ids, attention_mask=mask).logits[seen])


@torch.no_grad()
def test_composition_changes_the_logits(make, tokens):
    """Else the other tests would show nothing."""
    model, ids = make(), tokens(2, 30)
    before = model(ids).logits
    for module in model.modules():
        if isinstance(module, Compose):
            module.reset_to_identity()
    assert (model(ids).logits - before).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [1, 5, 8])
def test_a_local_layer_sees_exactly_its_window(make, tokens, compose, implementation, window):
    model = make(num_hidden_layers=1, window_pattern="L", sliding_window=window, compose=compose)
    model.set_attn_implementation(implementation)
    ids, i = tokens(1, 24), 20
    moved = [ids.clone() for _ in range(3)]
    for changed, position in zip(moved, (i - window, i - window + 1, i + 1), strict=True):
        changed[0, position] = changed[0, position] % 96 + 1
    before = model(ids).logits[0, i]
    outside, first, later = (model(changed).logits[0, i] for changed in moved)
    assert torch.equal(outside, before) and torch.equal(later, before)
    assert (first - before).abs().max() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, {"static": True, "groups": 2}, None], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_itself_alone(make, tokens, compose, side):
    model = make(compose=compose)
    lengths, T = (30, 19, 3), 30  # the padding is longer than the window
    ids, mask = tokens(3, T), torch.zeros(3, T, dtype=torch.long)
    rows = [slice(T - n, T) if side == "left" else slice(n) for n in lengths]
    for i, row in enumerate(rows):
        mask[i, row] = 1
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for i, row in enumerate(rows):
        close(logits[i, row], model(ids[i : i + 1, row]).logits[0])


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
def test_garbage_under_the_padding_changes_nothing(make, tokens, compose):
    model = make(compose=compose)
    embeds = model.get_input_embeddings()(tokens(2, 20))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :11] = 0
    garbage = embeds.clone()
    garbage[0, :11] = 1e4 * torch.randn(11, 64)
    seen = mask.bool()
    clean, dirty = (model(inputs_embeds=e, attention_mask=mask).logits[seen] for e in (embeds, garbage))
    close(dirty, clean, atol=1e-6)


def test_padding_leaves_the_gradients_alone(make, tokens):
    model, ids = make(), tokens(1, 12)
    padded = torch.cat([tokens(1, 15), ids], dim=1)
    mask = (torch.arange(27) >= 15).long()[None]
    labels = padded.masked_fill(mask == 0, -100)
    labels[0, 15] = -100  # alone, the first token is not predicted either
    grads = []
    for batch in ({"input_ids": ids, "labels": ids}, {"input_ids": padded, "attention_mask": mask, "labels": labels}):
        model.zero_grad()
        model(**batch).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, alone in grads[0].items():
        close(grads[1][name], alone, atol=1e-5 + 1e-4 * float(alone.abs().max()))


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
def test_packed_documents_do_not_see_each_other(make, tokens, compose):
    model, ids = make(compose=compose), tokens(1, 30)
    positions = torch.cat([torch.arange(13), torch.arange(17)])[None]
    logits = model(ids, position_ids=positions).logits
    close(logits[:, :13], model(ids[:, :13]).logits)
    close(logits[:, 13:], model(ids[:, 13:]).logits)


@torch.no_grad()
def test_masks_stay_linear_in_the_length(make, tokens, monkeypatch):
    seen = []

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return dcformer.composed_attention(*args, **kwargs)

    monkeypatch.setattr(dcformer.models.attention, "composed_attention", spy)
    model, ids = make(), tokens(2, 50)
    mask = torch.ones_like(ids)
    model(ids, attention_mask=mask)
    assert [(call["attn_mask"], call["is_causal"], call["window"]) for call in seen] == [(None, True, w) for w in (8, None) * 2]
    seen.clear()
    mask[0, :7] = 0
    model(ids, attention_mask=mask)
    assert [(call["attn_mask"].shape, call["is_causal"], call["window"]) for call in seen] == [
        ((2, 1, 1, 50), True, w) for w in (8, None) * 2
    ]


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_finished_mask_is_taken_as_it_is(make, tokens, compose, implementation):
    model, ids = make(compose=compose, window_pattern="G"), tokens(1, 12)
    model.set_attn_implementation(implementation)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    mask = visible if implementation == "sdpa" else torch.zeros(1, 1, 12, 12).masked_fill(~visible, float("-inf"))
    close(model(ids, attention_mask=mask).logits, model(ids).logits)
    close(model(ids, attention_mask={"full_attention": mask}).logits, model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, {"pre": False}, None], ids=str)
def test_eager_equals_sdpa_and_gives_the_composed_weights(make, tokens, compose):
    model, ids = make(compose=compose), tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    fast = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    out = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    close(out.logits[mask.bool()], fast[mask.bool()])
    assert [w.shape for w in out.attentions] == [(2, 4, 20, 20)] * 4
    assert [h.shape for h in out.hidden_states] == [(2, 20, 64)] * 5
    far = torch.ones(20, 20).tril(-8).bool() | torch.ones(20, 20).triu(1).bool()
    assert (out.attentions[0][0][:, far] == 0).all() and (out.attentions[1][0][:, 19, 0] != 0).all()
    sums = out.attentions[1][0].sum(-1)
    assert (compose is None) == torch.allclose(sums, torch.ones_like(sums))


@pytest.mark.parametrize("compose", [{}, None], ids=str)
@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "nonsense", "somebody_elses"])
def test_no_attention_implementation_runs_in_silence_what_it_is_not(make, compose, name):
    AttentionInterface.register("somebody_elses", lambda *args, **kwargs: pytest.fail("plain attention ran"))
    model = make(compose=compose)
    with pytest.raises(ValueError, match=r"attn_implementation=.* is not supported; choose 'sdpa'"):
        model.set_attn_implementation(name)
    with pytest.raises(ValueError, match=r"attn_implementation=.* is not supported"):
        AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation=name)


def test_loss_counts_the_items_of_the_whole_batch(make, tokens):
    model, ids = make(), tokens(4, 16)
    labels = ids.clone()
    labels[0, 3:] = labels[2, 10:] = -100  # unequal counts a row
    whole = model(ids, labels=labels).loss
    items = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=items).loss for i in (0, 2)]
    close(sum(parts), whole)


@pytest.mark.parametrize("compose", [{}, None], ids=str)
def test_gradient_checkpointing_gives_the_same_gradients(make, tokens, compose):
    model, ids = make(compose=compose, attention_dropout=0.1).train(), tokens(2, 20)
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        torch.manual_seed(3)  # the same dropout
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, labels=ids).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        close(checkpointed, plain, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_exact_as_the_specification_in_bf16(make, tokens, autocast):
    model, ids = make(), tokens(2, 40)
    exact = model(ids).logits
    rounded = model if autocast else copy.deepcopy(model).to(torch.bfloat16)
    errors = {}
    for implementation in ("sdpa", "eager"):
        rounded.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = rounded(ids).logits
        assert logits.dtype == torch.bfloat16
        errors[implementation] = (logits - exact).abs().mean()
    assert errors["sdpa"] < 2 * errors["eager"]


def test_autocast_trains(make, tokens):
    model, ids = make(), tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_arguments_of_transformers(make, tokens):
    model, ids = make(), tokens(2, 10)
    logits = model(ids).logits
    close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, logits)
    close(model(ids, logits_to_keep=3).logits, logits[:, -3:])
    close(model(ids, return_dict=False)[0], logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)


@torch.no_grad()
def test_embeddings_can_be_tied(make, tokens):
    model = make(tie_word_embeddings=True)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model(tokens(1, 5)).logits.isfinite().all()


@torch.no_grad()
def test_a_mask_longer_than_the_positions_is_cut_and_a_shorter_one_refused(make, tokens):
    model, ids = make(sliding_window=3, window_pattern="LG").eval(), tokens(3, 9)
    long = torch.cat([torch.ones(3, 9, dtype=torch.long), torch.zeros(3, 3, dtype=torch.long)], 1)
    close(model(ids, attention_mask=long).logits, model(ids).logits)
    cache = model(ids[:, :5], attention_mask=long, use_cache=True).cache
    close(model(ids[:, 5:], attention_mask=long, cache=cache).logits, model(ids).logits[:, 5:])
    with pytest.raises(ValueError, match="attention_mask has length 5; it must cover all 9 positions"):
        model(ids, attention_mask=torch.ones(3, 5, dtype=torch.long))
