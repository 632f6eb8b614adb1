"""With a cache: whatever is generated has the logits that one pass without a cache gives to the same tokens."""

import contextlib
import copy

import pytest
import torch
from transformers import Cache, ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

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
    check_generating(make(compose=compose), tokens, mode)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_generating_equals_one_pass_for_dcpythia(make, tokens, mode):
    check_generating(make("dcpythia"), tokens, mode)


def check_generating(model, tokens, mode):
    ids, mask = padded(tokens)
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **MODES[mode]}
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings)
    assert out.sequences.shape == (3, 34)
    close(torch.stack(out.logits, dim=1), uncached(model, out.sequences, mask))


@torch.no_grad()
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "dc_cpu", "dc_chunked", "dc_reference"])
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
def test_tokens_of_an_assistant_are_taken_back(make, tokens):
    model, assistant = make(), make(num_hidden_layers=2)
    ids = tokens(1, 24)
    sequence = model.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=assistant)
    logits = uncached(model, sequence, torch.ones_like(ids))[0]
    close(logits.gather(1, sequence[0, 24:, None])[:, 0], logits.amax(-1))  # greedy, up to ties


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, {"post": False}, None], ids=str)
@pytest.mark.parametrize("kind", ["dcformer", "dcpythia"])
def test_continuous_batching(make, tokens, compose, kind):
    model = make(kind, compose=compose)
    prompts = [tokens(length) for length in (20, 9, 3)]
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32, page_size=16)  # by default all memory
    results = model.generate_batch(
        [prompt.tolist() for prompt in prompts], generation_config=config, continuous_batching_config=small
    )
    assert len(results) == 3 and model.config.head_dim == 16
    for prompt, result in zip(prompts, results.values(), strict=True):
        sequence = torch.cat([prompt, torch.tensor(result.generated_tokens)])[None]
        logits = uncached(model, sequence, torch.ones_like(prompt)[None])[0]
        assert len(logits) == 8
        close(logits.gather(1, sequence[0, len(prompt) :, None])[:, 0], logits.amax(-1))


def test_the_paged_implementation_is_refused_outside_continuous_batching(make, tokens):
    model = make()
    model.set_attn_implementation("paged|eager")
    with pytest.raises(ValueError, match="is for generate_batch only; choose 'eager'"):
        model(tokens(1, 4))


@torch.no_grad()
@pytest.mark.parametrize("compose", [{}, {"pre": False}, None], ids=str)
def test_a_quantised_cache(make, tokens, compose):
    """As exact as four bits allow: the first token exactly, those after it as well as without composition."""
    pytest.importorskip("optimum.quanto")
    model = make(compose=compose, window_pattern="G", sliding_window=None)
    ids = tokens(3, 20)
    settings = {"backend": "quanto", "nbits": 4, "q_group_size": 16}
    out = model.generate(
        ids, max_new_tokens=6, do_sample=False, pad_token_id=0, cache_implementation="quantized", cache_config=settings,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits, expected = torch.stack(out.logits, dim=1), uncached(model, out.sequences, torch.ones_like(ids))
    close(logits[:, 0], expected[:, 0])
    error = (logits - expected).norm() / expected.norm()
    assert 0 < error < 0.5  # without key-wise weights, or with those of other heads, about 1


class NoStream(contextlib.nullcontext):
    def wait_stream(self, other):
        pass


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache(make, tokens, implementation, monkeypatch):
    """Where there is no GPU, its streams are replaced, and layers are moved from the CPU to the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        monkeypatch.setattr(torch, "Stream", NoStream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: NoStream())
    moved = []
    monkeypatch.setattr(Cache, "offload", lambda self, *args, to=Cache.offload: (moved.append(args), to(self, *args)))
    model, ids = make().to(device), tokens(2, 20).to(device)
    out = model.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, cache_implementation=implementation,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    close(torch.stack(out.logits, dim=1), uncached(model, out.sequences, torch.ones_like(ids)))
    assert len(moved) == 12 * 4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dcformer", "dcpythia"])
def test_the_cache_costs_at_most_7_percent_more(make, tokens, kind):
    """At the shape of the released models, N = 32, D = 80; the authors' costs 46 % more."""
    shape = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 80, "num_hidden_layers": 2}

    def size(compose):
        cache = make(kind, compose=compose, **shape)(tokens(1, 24), use_cache=True).cache
        return sum(states.numel() * states.element_size() for layer in cache.layers for states in (layer.keys, layer.values))

    assert 1 < size({}) / size(None) <= 1.07


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
