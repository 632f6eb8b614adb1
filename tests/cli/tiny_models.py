"""Models with random weights, with a tokenizer of few words, in the folders that the command line takes."""

import json

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from dcformer import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.training.tokenizer import train_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,  # so that each next token has a clear favourite
}
KINDS = {
    "dcformer": (DCFormerConfig, DCFormerForCausalLM),
    "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}

logging.disable_progress_bar()
tokenizer = train_tokenizer(iter([" ".join(WORDS)] * 4), 400)


def write_checkpoint(folder, kind="dcformer", chat_template=None, **changes):
    """Gives the model, as it was written."""
    config, model = KINDS[kind]
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}  # Llama's own end is another token
    model(config(**{**SHAPE, **tokens, **changes})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if chat_template:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": chat_template}))
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def goes_on(model, text, tokens):
    """What the model writes after a text, always the likeliest token, without a cache and without `generate`."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < start + tokens and ids[0, -1] != tokenizer.eos_token_id:
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)
