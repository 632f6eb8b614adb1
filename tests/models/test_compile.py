"""torch.compile with fullgraph=True. Backends that only capture: what the compiler makes of the graph is not ours."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig

LENGTHS = (9, 10, 12, 15, 16, 17, 23, 31, 32, 33, 40, 64)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_twelve_lengths_need_two_graphs(make, tokens):
    model = make(num_hidden_layers=2).train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for T in LENGTHS:
        ids = tokens(2, T)
        torch.testing.assert_close(compiled(input_ids=ids, labels=ids).loss, model(input_ids=ids, labels=ids).loss)
    assert counter.frame_count <= 2  # the first length, then any


def test_a_compiled_training_step_has_the_same_gradients(make, tokens):
    model = make(num_hidden_layers=1).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    grads = []
    for step in (model, compiled):
        model.zero_grad()
        step(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)


@torch.no_grad()
def test_compiled_decoding_with_a_static_cache(make, tokens):
    model = make(num_hidden_layers=2)
    compile_config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    compile_config._compile_all_devices = True  # transformers compiles by itself on GPUs only
    graphs = []
    for _ in range(2):  # two prompts in a row: the second meets a used cache and finished graphs
        ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
        mask[0, :5] = 0
        prompt = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
        out = model.generate(
            **prompt, cache_implementation="static", compile_config=compile_config,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        grown = torch.cat([mask, mask.new_ones(2, 10)], dim=1)
        expected = model(out.sequences, attention_mask=grown, use_cache=False).logits[:, 11:-1]
        torch.testing.assert_close(torch.stack(out.logits, dim=1), expected, atol=5e-5, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert 1 <= graphs[0] == graphs[1]
