"""Commands that use a trained model: `generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dcformer.cli.common import load


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a trained model.", show_default=False)],
    prompt: Annotated[str, typer.Option(help='What to go on from; "-" reads it from standard input.')] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="Below 1 is safer, above 1 wilder.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest tokens; 0: among all.")] = 50,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest tokens that together have this probability.")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token; no chance.")] = False,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Write the text to this file too.", show_default=False)] = None,
) -> None:
    """Let a trained model write."""
    if not temperature > 0:
        raise typer.BadParameter(
            f"{temperature} must be above 0; --greedy takes the likeliest token", param_hint="--temperature"
        )
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} must be above 0 and at most 1", param_hint="--top-p")
    import torch
    from transformers import TextStreamer, set_seed

    from dcformer.training.files import explained_disk_errors, write_text

    model, tokenizer = load(checkpoint)
    if prompt == "-":
        prompt = sys.stdin.read()
    # Training documents end with this token, so that a text begins after it.
    ids = tokenizer.encode(prompt, add_special_tokens=False) or [tokenizer.eos_token_id]
    if seed is not None:
        set_seed(seed)
    sampling: dict[str, Any] = {} if greedy else {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens = model.generate(
        torch.tensor([ids], device=model.device),
        max_new_tokens=max_new_tokens,
        do_sample=not greedy,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with explained_disk_errors("the sample", out.parent):
            write_text(out, tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n")
