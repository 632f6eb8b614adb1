"""With a cache: whatever is generated has the logits that one pass without a cache gives to the same tokens."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

COMPOSITIONS = [
    {},
    {"key_wise": False},
    {"pre": False, "static": True, "rank": 1},
    {"post": False},
    {"groups": 2, "gates": False},
    None,
]
MODES = {
    "dynamic": {},
    "no cache": {"use_cache": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "chunked prefill": {"prefill_chunk_size": 6},
    "static": {"cache_implementation": "static"},
    "static, chunked prefill": {"cache_implementation": "static", "prefill_chunk_size": 6},
}


def close(actual, expected, atol=5e-5):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def padded(tokens, pads=(0, 5, 13), length=20):
    """Prompts of unequal length, padded on the left, and their mask."""
    return tokens(len(pads), length), (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


def uncached(model, sequences, mask):
    """Logits of the generated tokens, [B, new, V], in one pass."""
    grown = torch.cat([mask, mask.new_ones(len(mask), sequences.shape[1] - mask.shape[1])], dim=1)
    return model(sequences, attention_mask=grown, use_cache=False).logits[:, mask.shape[1] - 1 : -1]


@torch.no_grad()
@pytest.mark.parametrize("compose", COMPOSITIONS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_generating_equals_one_pass(make, tokens, compose, mode):
    model = make(compose=compose)
    ids, mask = padded(tokens)
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **MODES[mode]}
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings)
    assert out.sequences.shape == (3, 34)
    close(torch.stack(out.logits, dim=1), uncached(model, out.sequences, mask))


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_head_sharing_and_implementations(make, tokens, heads, implementation, cache):
    model = make(num_key_value_heads=heads)
    model.set_attn_implementation(implementation)
    ids, mask = padded(tokens)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation=cache,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    close(torch.stack(out.logits, dim=1), uncached(model, out.sequences, mask))


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
def test_a_window_of_one(make, tokens, compose):
    model = make(compose=compose, sliding_window=1)
    ids, mask = padded(tokens)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    close(torch.stack(out.logits, dim=1), uncached(model, out.sequences, mask))


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
def test_beams_have_the_likelihood_they_claim(make, tokens, compose):
    model = make(compose=compose)
    ids, mask = padded(tokens)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=14, do_sample=False, num_beams=3, num_return_sequences=3, length_penalty=0.0,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    log_p = uncached(model, out.sequences, mask.repeat_interleave(3, dim=0)).log_softmax(-1)
    likelihood = log_p.gather(2, out.sequences[:, 20:, None]).sum((1, 2))
    close(out.sequences_scores, likelihood, atol=1e-4)


@torch.no_grad()
def test_guessed_tokens_are_taken_back(make, tokens):
    """Prompt lookup crops the cache where a guess was wrong."""
    model = make()
    ids = tokens(1, 6).repeat(1, 4)
    sequence = model.generate(ids, max_new_tokens=16, do_sample=False, prompt_lookup_num_tokens=4)
    logits = uncached(model, sequence, torch.ones_like(ids))[0]
    chosen = logits.gather(1, sequence[0, 24:, None])[:, 0]
    close(chosen, logits.amax(-1))  # greedy, up to ties


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, None], ids=str)
@pytest.mark.parametrize("kind", ["with sliding layers", "without", "static"])
def test_prefill_chunk_and_single_tokens_equal_one_pass(make, tokens, compose, kind):
    model, ids = make(compose=compose), tokens(2, 40)
    cache = {
        "with sliding layers": lambda: DynamicCache(config=model.config),
        "without": DynamicCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=48),
    }[kind]()
    pieces = [model(part, cache=cache, use_cache=True).logits for part in ids.split([5, 2, 11, 1, 7, 1, 1, 12], dim=1)]
    close(torch.cat(pieces, dim=1), model(ids, use_cache=False).logits)


@torch.no_grad()
def test_the_cache_holds_key_wise_weights_behind_keys_and_values(make, tokens):
    model = make()
    cache = model(tokens(2, 20), use_cache=True).cache
    width = 16 + (2 * 2 + 1) * 4 // 2
    local, whole = cache.layers[:2]
    assert local.keys.shape == local.values.shape == (2, 2, 7, width)
    assert whole.keys.shape == whole.values.shape == (2, 2, 20, width)


@torch.no_grad()
def test_the_older_name_of_the_cache_is_understood(make, tokens):
    model, ids = make(), tokens(1, 12)
    cache = model(ids[:, :8], use_cache=True).cache
    close(model(ids[:, 8:], past_key_values=cache).logits, model(ids).logits[:, 8:])


@torch.no_grad()
def test_in_bf16_a_cache_costs_no_precision(make, tokens):
    exact = make()
    model = copy.deepcopy(exact).to(torch.bfloat16)
    ids, mask = padded(tokens)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    expected = uncached(exact, out.sequences, mask)
    budget = (uncached(model, out.sequences, mask) - expected).abs().mean()
    assert (torch.stack(out.logits, dim=1) - expected).abs().mean() < 1.5 * budget


@torch.no_grad()
def test_autocast_generates(make, tokens):
    model = make()
    ids, mask = padded(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        rounded = uncached(model, out.sequences, mask)
    expected = uncached(model, out.sequences, mask)
    budget = (rounded - expected).abs().mean()
    assert (torch.stack(out.logits, dim=1) - expected).abs().mean() < 1.5 * budget
