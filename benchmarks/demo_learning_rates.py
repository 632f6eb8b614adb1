"""Trains both models of the demo over one grid of learning rates, which the demo's own rate comes from.

    python benchmarks/demo_learning_rates.py [--out results/demo/learning_rates.csv] [--runs runs/learning-rates]

The Transformer is trained at every rate; the DCFormer at every rate with every share of it for its composition weights. A
grid that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

from rich.console import Console

from dcformer.models.dcformer import DCFormerConfig
from dcformer.studies.compare import PRESETS, baseline
from dcformer.studies.provenance import provenance
from dcformer.training import TrainSettings, prepare_data, train, with_vocabulary

RATES = (3e-3, 6e-3, 1.2e-2)
RATIOS = (1.0, 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/demo/learning_rates.csv"))
    parser.add_argument("--runs", type=Path, default=Path("runs/learning-rates"), help="folder for the trained models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=PRESETS["demo"].train["steps"])
    arguments = parser.parse_args()
    preset, console = PRESETS["demo"], Console(stderr=True)
    prepared = prepare_data(preset.data)
    config = DCFormerConfig(max_position_embeddings=preset.data.block_size, **preset.model)
    config = with_vocabulary(config, prepared.tokenizer)
    plain = baseline(config)
    rows = []
    for rate in RATES:
        for model, ratio in (("transformer", 1.0), *(("dcformer", ratio) for ratio in RATIOS)):
            options = {
                "steps": arguments.steps,
                "learning_rate": rate,
                "composition_learning_rate_ratio": ratio,
                "eval_every": arguments.steps,
                "seed": arguments.seed,
                "out": str(arguments.runs / f"{model}-{rate:g}-{ratio:g}-seed{arguments.seed}"),
            }
            settings = TrainSettings(**{**preset.train, **options})
            result = train(plain if model == "transformer" else config, prepared, settings, console=console)
            row = {"model": model, "learning_rate": rate, "composition_learning_rate_ratio": ratio, "seed": arguments.seed}
            rows.append({**row, "steps": arguments.steps, "loss": round(result.evaluations[-1]["loss"], 4)})
            print(rows[-1], flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    arguments.out.with_suffix(".json").write_text(json.dumps({"command": sys.argv, **provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
