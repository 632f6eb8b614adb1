"""Commands that use a trained model: `generate` and `chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from dcformer.cli.common import Checkpoint, load

MaxNewTokens = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="Below 1 is safer, above 1 wilder.")]
TopK = Annotated[int, typer.Option(min=0, help="Choose among the k likeliest tokens; 0: among all.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that together have this probability.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always the likeliest token; no chance.")]
Seed = Annotated[int | None, typer.Option(help="The same seed writes the same text.", show_default=False)]


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help='What to go on from; "-" reads it from standard input.')] = "",
    max_new_tokens: MaxNewTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    greedy: Greedy = False,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Write the text to this file too.", show_default=False)] = None,
) -> None:
    """Let a model write."""
    options = _sampling(temperature, top_k, top_p, greedy)
    from dcformer.training.files import explained_disk_errors, write_text

    model, tokenizer = load(checkpoint)
    ids = _tokens(tokenizer, sys.stdin.read() if prompt == "-" else prompt)
    _set_seed(seed)
    tokens = _stream(model, tokenizer, ids, max_new_tokens=max_new_tokens, **options)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with explained_disk_errors("the sample", out.parent):
            write_text(out, tokenizer.decode(tokens, skip_special_tokens=True) + "\n")


def chat(
    checkpoint: Checkpoint,
    max_new_tokens: MaxNewTokens = 500,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    greedy: Greedy = False,
    seed: Seed = None,
) -> None:
    """Talk with a model, line by line; one without a chat template goes on writing what you began. Ctrl-C or Ctrl-D leaves."""
    options = _sampling(temperature, top_k, top_p, greedy)
    model, tokenizer = load(checkpoint)
    _set_seed(seed)
    room = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize) - max_new_tokens
    said: list[tuple[str, str]] = []
    try:
        for line in _typed_lines():
            said.append((line, ""))
            while len(ids := _conversation(tokenizer, said)) > room and len(said) > 1:
                said.pop(0)  # the oldest is forgotten first
            tokens = _stream(model, tokenizer, ids, skip_prompt=True, max_new_tokens=max_new_tokens, **options)
            said[-1] = (line, tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True))
    except KeyboardInterrupt:
        typer.echo()


def _sampling(temperature: float, top_k: int, top_p: float, greedy: bool) -> dict[str, Any]:
    """As `generate` of transformers takes them."""
    if not temperature > 0:
        raise typer.BadParameter(
            f"{temperature} must be above 0; --greedy takes the likeliest token", param_hint="--temperature"
        )
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} must be above 0 and at most 1", param_hint="--top-p")
    if greedy:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}


def _set_seed(seed: int | None) -> None:
    from transformers import set_seed

    if seed is not None:
        set_seed(seed)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    """Documents that we train on end with the token that an empty text is taken for: text begins after it."""
    ids = tokenizer.encode(text) or [tokenizer.eos_token_id]
    if ids == [None]:
        raise ValueError("the tokenizer has no token to begin a text with; give a prompt")
    return ids


def _conversation(tokenizer: Any, said: list[tuple[str, str]]) -> list[int]:
    """Tokens of all that was asked and answered, up to where the last answer begins."""
    if not tokenizer.chat_template:
        return _tokens(tokenizer, "\n".join(asked + answered for asked, answered in said))
    messages = []
    for asked, answered in said:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)


def _stream(model: Any, tokenizer: Any, ids: list[int], *, skip_prompt: bool = False, **options: Any) -> Any:
    """Writes to standard output while it generates. Returns all tokens, those of the prompt included."""
    import torch
    from transformers import TextStreamer

    prompt = torch.tensor([ids], device=model.device)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        eos_token_id=model.generation_config.eos_token_id or tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True),
        **options,
    )[0]


def _typed_lines() -> Iterator[str]:
    """What comes on standard input until it ends, blank lines left out; a terminal gets a prompt and line editing."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):  # not on Windows
            import readline  # noqa: F401
    with suppress(EOFError):
        while True:
            if line := input(prompt).strip():
                yield line
