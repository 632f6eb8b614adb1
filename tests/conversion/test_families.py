"""Families besides the plain decoders: capped scores, sinks, windows, position biases, cross-attention, images, two towers."""

import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig

import dcformer
from dcformer.nn import Compose

LENGTH = 9
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TEXT = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**TEXT, **TOKENS, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6}
IMAGE = {**TEXT, "image_size": 8, "patch_size": 4}
IMAGE.pop("vocab_size")
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
PAIR = {"d_model": 32, "vocab_size": 97, **TOKENS, "decoder_start_token_id": 1}
T5 = {"d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
WHISPER = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
FAMILIES = {
    "gemma2": ("AutoModelForCausalLM", {**DECODER, **MIXED, "attn_logit_softcapping": 0.5}),
    "gemma3_text": ("AutoModelForCausalLM", {**DECODER, **MIXED}),
    "gpt_oss": ("AutoModelForCausalLM", {**DECODER, **MIXED, **EXPERTS}),
    "bert": ("AutoModelForMaskedLM", TEXT),
    "roberta": ("AutoModelForMaskedLM", {**TEXT, **TOKENS}),
    "vit": ("AutoModelForImageClassification", IMAGE),
    "deit": ("AutoModelForImageClassification", IMAGE),
    "dinov2": ("AutoModelForImageClassification", IMAGE),
    "clip": ("AutoModel", {"text_config": {**TEXT, "eos_token_id": 96}, "vision_config": IMAGE, "projection_dim": 16}),
    "t5": ("AutoModelForSeq2SeqLM", {**PAIR, **T5}),
    "whisper": ("AutoModelForSpeechSeq2Seq", {**PAIR, **WHISPER}),
}
GENERATING = ("gemma2", "gemma3_text", "gpt_oss", "t5", "whisper")


def make(family):
    auto, options = FAMILIES[family]
    config = AutoConfig.for_model(family, **options)
    if family == "deit":  # one Auto class has two of it
        config.architectures = ["DeiTForImageClassification"]
    model = getattr(transformers, auto).from_config(config).eval()
    with torch.no_grad():  # families start small in different ways; mistakes should show
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.normal_(0, 0.2)
            elif name.endswith("sinks"):
                parameter.normal_()
    return model


def loud(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".compose." in name:
                parameter.normal_(0, 0.2)
    return model


def inputs(family):
    ids, image = torch.randint(2, 96, (2, LENGTH)), torch.randn(2, 3, 8, 8)
    if family == "clip":
        ids[:, -1] = 96  # where the text is pooled
        return {"input_ids": ids, "pixel_values": image}
    if family in ("vit", "deit", "dinov2"):
        return {"pixel_values": image}
    if family == "whisper":
        return {"input_features": torch.randn(2, 8, 24), "decoder_input_ids": ids}
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    return given | ({"decoder_input_ids": torch.randint(2, 96, (2, 5))} if family == "t5" else {})


def outputs(model, given):
    made = model(**given)
    out = made.logits if "logits" in made else torch.cat([made.text_embeds, made.image_embeds])
    return out[given["attention_mask"].bool()] if out.shape[:2] == (2, LENGTH) and "attention_mask" in given else out


def generate(model, given, **options):
    given = {name: value for name, value in given.items() if not name.startswith("decoder_")}
    return model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay_the_same_and_come_back(family):
    model, given = make(family), inputs(family)
    kind, attention, before = type(model), model.config._attn_implementation, outputs(model, given)
    dcformer.convert(model)
    torch.testing.assert_close(outputs(model, given), before, atol=2e-5, rtol=0)
    loud(model)
    changed = outputs(model, given)
    assert (changed - before).abs().max() > 1e-2
    model.set_attn_implementation("eager")
    torch.testing.assert_close(outputs(model, given), changed, atol=5e-5, rtol=1e-4)
    dcformer.unconvert(model)
    model.set_attn_implementation(attention)
    assert type(model) is kind
    assert torch.equal(outputs(model, given), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_move_every_composition(family):
    model, given = dcformer.convert(make(family), static=True, trainable="composition").train(), inputs(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert before and all(".compose." in name for name in before)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    weights = torch.randn_like(outputs(model, given))
    for _ in range(3):
        optimizer.zero_grad()
        (outputs(model, given) * weights).sum().backward()
        optimizer.step()
    for name, parameter in before.items():
        assert not torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize("family", GENERATING)
def test_every_cache_gives_the_text_that_no_cache_gives(family):
    model, given = loud(dcformer.convert(make(family))), inputs(family)
    greedy = generate(model, given, use_cache=False)
    assert torch.equal(generate(model, given), greedy)
    assert torch.equal(generate(model, given, cache_implementation="static"), greedy)
    beams = generate(model, given, num_beams=2, use_cache=False)
    assert torch.equal(generate(model, given, num_beams=2), beams)


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


RELOAD = """
import sys, torch, transformers, dcformer
for folder in sys.argv[1:]:
    auto, given, expected = torch.load(f"{folder}/expected.pt")
    made = getattr(transformers, auto).from_pretrained(folder)(**given)
    out = made.logits if "logits" in made else torch.cat([made.text_embeds, made.image_embeds])
    if out.shape[:2] == given.get("attention_mask", out[0]).shape:
        out = out[given["attention_mask"].bool()]
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0, msg=folder)
"""


def test_reloads_in_a_fresh_process(tmp_path):
    for family in FAMILIES:
        model, given = loud(dcformer.convert(make(family))), inputs(family)
        model.save_pretrained(tmp_path / family)
        torch.save((FAMILIES[family][0], given, outputs(model, given)), tmp_path / family / "expected.pt")
    subprocess.run([sys.executable, "-c", RELOAD, *map(str, tmp_path.iterdir())], check=True)


def test_part_of_a_pair_of_towers_is_not_saved_alone(tmp_path):
    model = dcformer.convert(make("clip"))
    with pytest.raises(ValueError, match="part of a converted model"):
        model.text_model.save_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["bloom", "deberta-v2", "falcon"])
def test_attention_of_its_own_is_refused(family):
    config = AutoConfig.for_model(family, vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.AutoModel.from_config(config)
    kind = type(model)
    with pytest.raises(ValueError, match="does not go through transformers' attention interface"):
        dcformer.convert(model)
    assert type(model) is kind
