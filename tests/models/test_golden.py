"""The mathematics of operator, Compose and models together, against logits of the authors' own code."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dcformer.models.attention
from dcformer import composed_attention

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
PREFILL = 48
pytestmark = [
    pytest.mark.skipif(not GOLDEN.exists(), reason="the authors' golden outputs are not here"),
    pytest.mark.filterwarnings("ignore:config.json has keys that mean nothing to"),  # prefill_length
]


@pytest.fixture(scope="module", params=["dcformer", "dcpythia"])
def theirs(request, tmp_path_factory):
    """A model as `from_pretrained` loads it from the released format, inputs and logits, and the folder."""
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    shutil.copy(GOLDEN / f"{name}.config.json", folder / "config.json")
    shutil.copy(GOLDEN / f"{name}.weights.safetensors", folder / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model, load_file(GOLDEN / f"{name}.io.safetensors"), folder


@pytest.fixture(params=["cpu", "chunked", "reference", "eager"])
def backend(request, theirs, monkeypatch):
    """Every composed attention of a test runs on this backend; "eager" is a function of its own."""
    theirs[0].set_attn_implementation("eager" if request.param == "eager" else "sdpa")

    def forced(*arguments, **options):
        calls.append(request.param)
        return composed_attention(*arguments, **{**options, "backend": request.param})

    calls = []
    monkeypatch.setattr(dcformer.models.attention, "composed_attention", forced)
    yield
    assert request.param == "eager" or calls


@torch.no_grad()
def test_one_pass_gives_the_authors_logits(theirs, backend):
    model, io, _ = theirs
    torch.testing.assert_close(model(io["input_ids"]).logits, io["logits"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_prefill_and_decoding_give_the_authors_logits(theirs, backend):
    model, io, _ = theirs
    out = model(io["input_ids"][:, :PREFILL], use_cache=True)
    logits = [out.logits]
    for i in range(PREFILL, io["input_ids"].shape[1]):
        out = model(io["input_ids"][:, i : i + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), io["logits_prefill_then_decode"], atol=1e-4, rtol=0)


def test_saved_again_it_is_the_authors_file(theirs, tmp_path):
    model, _, folder = theirs
    model.save_pretrained(tmp_path)
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
