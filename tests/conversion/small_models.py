"""Tiny random models of the families that can be converted, and what goes in and comes out."""

import torch
import transformers
from transformers import AutoConfig

LENGTH = 9
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TEXT = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CAUSAL = {**TEXT, **TOKENS}
SHARED = {**CAUSAL, "num_key_value_heads": 2, "head_dim": 12}
WINDOWS = {**SHARED, "sliding_window": 6}
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
DECODERS = {
    "llama": SHARED,
    "qwen2": {**CAUSAL, "num_key_value_heads": 2},
    "qwen3": SHARED,
    "mistral": WINDOWS,
    "olmo2": {**CAUSAL, "num_key_value_heads": 2},
    "phi3": {**CAUSAL, "num_key_value_heads": 2, "sliding_window": 6},
    "gpt_neox": CAUSAL,
    "gpt2": CAUSAL,
    "falcon": CAUSAL,
    "gemma2": {**WINDOWS, **MIXED, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**WINDOWS, **MIXED},
    "gpt_oss": {**WINDOWS, **MIXED, **EXPERTS},
}
OTHERS = {
    "bert": ("AutoModelForMaskedLM", TEXT),
    "roberta": ("AutoModelForMaskedLM", {**TEXT, **TOKENS}),
    "splinter": ("AutoModel", TEXT),
    "vit": ("AutoModelForImageClassification", IMAGE),
    "deit": ("AutoModelForImageClassification", IMAGE),
    "dinov2": ("AutoModelForImageClassification", IMAGE),
    "clip": ("AutoModel", {"text_config": {**TEXT, "eos_token_id": 96}, "vision_config": IMAGE, "projection_dim": 16}),
    "t5": ("AutoModelForSeq2SeqLM", {**PAIR, **T5}),
    "whisper": ("AutoModelForSpeechSeq2Seq", {**PAIR, **WHISPER}),
}
FAMILIES = {family: ("AutoModelForCausalLM", options) for family, options in DECODERS.items()} | OTHERS
GENERATING = (*DECODERS, "t5", "whisper")


def make(family, **options):
    """A model in eval mode, whose parts all show in its outputs."""
    auto, shape = FAMILIES[family]
    config = AutoConfig.for_model(family, **{**shape, **options})
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
    """Composition that changes the outputs: at the identity a mistake would not show."""
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
    """Logits or embeddings; those of padding are left out."""
    made = model(**given)
    if "text_embeds" in made:
        return torch.cat([made.text_embeds, made.image_embeds])
    out = made.logits if "logits" in made else made.last_hidden_state
    return out[given["attention_mask"].bool()] if out.shape[:2] == (2, LENGTH) and "attention_mask" in given else out


def generate(model, given, **options):
    given = {name: value for name, value in given.items() if not name.startswith("decoder_")}
    return model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)
