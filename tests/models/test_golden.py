"""The mathematics of operator, Compose and model together, against logits of the authors' own code."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dcformer import DCFormerConfig, DCFormerForCausalLM

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the authors' golden outputs are not here")


def _renamed(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Released names to ours. Rotary pairs are halves in both, so no rows move."""
    ours = {
        "model.embed_tokens.weight": weights["tok_embeddings.weight"],
        "model.norm.weight": weights["norm.weight"],
        "lm_head.weight": weights["output.weight"],
    }
    for i in range(layers):
        theirs = {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
        query, key, value = theirs["attention.wqkv.weight"].chunk(3)
        layer = {
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.o_proj.weight": theirs["attention.wo.weight"],
            "self_attn.q_norm.weight": theirs["attention.q_norm.scale"],
            "self_attn.k_norm.weight": theirs["attention.k_norm.scale"],
            "self_attn.compose.dynamic.dw1": theirs["attention.dyn_w_proj.dw1"],
            "self_attn.compose.dynamic.qkw": theirs["attention.dyn_w_proj.qkw"],
            "self_attn.compose.dynamic.dd": theirs["attention.dyn_w_proj.dd"],
            "mlp.gate_proj.weight": theirs["feed_forward.w1.weight"],
            "mlp.up_proj.weight": theirs["feed_forward.w3.weight"],
            "mlp.down_proj.weight": theirs["feed_forward.w2.weight"],
            "input_layernorm.weight": theirs["attention_norm.weight"],
            "post_attention_layernorm.weight": theirs["ffn_norm.weight"],
        }
        ours |= {f"model.layers.{i}.{name}": weight for name, weight in layer.items()}
    return ours


@pytest.fixture(scope="module")
def theirs() -> tuple[DCFormerForCausalLM, dict[str, Tensor], int]:
    released = json.loads((GOLDEN / "dcformer.config.json").read_text())
    config = DCFormerConfig(
        vocab_size=released["vocab_size"],
        hidden_size=released["dim"],
        intermediate_size=released["intermediate_size"],
        num_hidden_layers=released["n_layer"],
        num_attention_heads=released["n_head"],
        qk_norm=released["use_qk_norm"],
        rms_norm_eps=released["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": float(released["rope_base"])},
        sliding_window=released["window_size"],
        window_pattern="LG",  # what their code does where the configuration names no window type
    )
    model = DCFormerForCausalLM(config).eval()
    model.load_state_dict(_renamed(load_file(GOLDEN / "dcformer.weights.safetensors"), config.num_hidden_layers))
    return model, load_file(GOLDEN / "dcformer.io.safetensors"), released["prefill_length"]


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_one_pass_gives_the_authors_logits(theirs, implementation):
    model, io, _ = theirs
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(model(io["input_ids"]).logits, io["logits"], atol=1e-4, rtol=0)


@torch.no_grad()
def test_prefill_and_decoding_give_the_authors_logits(theirs):
    model, io, prefill = theirs
    model.set_attn_implementation("sdpa")
    out = model(io["input_ids"][:, :prefill], use_cache=True)
    logits = [out.logits]
    for i in range(prefill, io["input_ids"].shape[1]):
        out = model(io["input_ids"][:, i : i + 1], cache=out.cache, use_cache=True)
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), io["logits_prefill_then_decode"], atol=1e-4, rtol=0)
