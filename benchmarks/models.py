"""Prefill and decoding of a DCFormer beside the same model without composition, and the memory of a model of the released size.

    python benchmarks/models.py [--quick] [--out results/models] [--rounds 5]

Writes models.json: machine, versions, commit; `speed`, medians over rounds in which both models take turns; `memory` of a
process that loads and generates with random weights of the shape of DCFormer-2.8B in bfloat16.

E hidden size, N heads, T length of the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.studies.provenance import provenance
from dcformer.training.files import write_text

NEW_TOKENS = 16


def speed(rounds: int, E: int = 1024, N: int = 16, layers: int = 8, T: int = 1024) -> list[dict[str, Any]]:
    """Seconds of a prompt of T tokens, and of a token after it."""
    models: dict[str, DCFormerForCausalLM] = {}
    for name, compose in (("compose=None", None), ("dcformer", {})):
        config = DCFormerConfig(
            hidden_size=E, num_attention_heads=N, num_hidden_layers=layers, intermediate_size=8 * E // 3, compose=compose
        )
        models[name] = DCFormerForCausalLM(config).eval()
    prompt = torch.randint(config.vocab_size, (1, T))
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for name, model in models.items():
            prefill, decode = clock(model, prompt)
            if turn:
                seconds.setdefault(("prefill", name), []).append(prefill)
                seconds.setdefault(("decoding", name), []).append(decode)
    lines = []
    for (what, name), times in seconds.items():
        ratio = statistics.median(t / s for t, s in zip(times, seconds[what, "compose=None"], strict=True))
        shape = {"hidden_size": E, "heads": N, "layers": layers, "T": T, "dtype": "fp32"}
        lines.append(
            {"what": what, "model": name, **shape, "seconds": statistics.median(times), "times_plain": ratio, "rounds": rounds}
        )
    return lines


@torch.no_grad()
def clock(model: DCFormerForCausalLM, prompt: torch.Tensor) -> tuple[float, float]:
    """Seconds of the prompt, and of each token after it."""
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    model(input_ids=prompt, cache=cache, logits_to_keep=1)
    prefilled = time.perf_counter()
    for _ in range(NEW_TOKENS):
        model(input_ids=prompt[:, :1], cache=cache)
    return prefilled - start, (time.perf_counter() - prefilled) / NEW_TOKENS


MAKE = """
import sys, torch
from dcformer import DCFormerConfig, DCFormerForCausalLM
size, folder = sys.argv[1:]
torch.set_default_dtype(torch.bfloat16)
DCFormerForCausalLM(DCFormerConfig.from_size(size)).save_pretrained(folder)
"""

# The peak counts all pages of the process that are in memory, those of the mapped weights too, less what Python and torch take.
LOAD = """
import sys, threading, time, torch
from pathlib import Path
import dcformer
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
now = lambda: 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
before, peak, running = now(), 0, True
def watch():
    global peak
    while running:
        peak = max(peak, now())
        time.sleep(0.01)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
loaded = time.perf_counter()
out = model.generate(torch.randint(model.config.vocab_size, (1, 64)), max_new_tokens=4, min_new_tokens=4, do_sample=False)
done = time.perf_counter()
running = False
thread.join()
weights = sum(p.numel() * p.element_size() for p in model.parameters())
print(weights, peak - before, loaded - start, done - loaded, out.shape[1])
"""


def memory(size: str) -> dict[str, Any]:
    """Peak of loading and generating (64 tokens in, 4 out), in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for script, arguments in ((MAKE, [size, folder]), (LOAD, [folder])):
            done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    weights, peak, load_seconds, generate_seconds, length = map(float, done.stdout.split())
    return {
        "size": size,
        "dtype": "bf16",
        "weights_mib": round(weights / 2**20),
        "peak_mib": round(peak / 2**20),
        "peak_times_weights": round(peak / weights, 3),
        "load_seconds": round(load_seconds, 1),
        "generate_seconds": round(generate_seconds, 1),
        "length": int(length),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/models"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small shapes only, to see that it runs")
    arguments = parser.parse_args()
    report = {"command": sys.argv, **provenance()}
    report["speed"] = speed(2, 64, 4, 2, 64) if arguments.quick else speed(arguments.rounds)
    report["memory"] = memory("1M" if arguments.quick else "2.8B")
    for line in (*report["speed"], report["memory"]):
        print(line)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out / "models.json", json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
