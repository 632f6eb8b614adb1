"""Does a DCFormer learn better without its key-wise part? Trains that variant beside the same-size Transformer, twice.

    python examples/compare_variant.py

The results go to runs/query_wise_only; the same command again goes on where it was stopped.
"""

from rich.console import Console

from dcformer import DCFormerConfig
from dcformer.studies.compare import compare
from dcformer.training import DataSettings, TrainSettings


def main() -> None:
    """Trains, and prints the verdict."""
    report = compare(
        DCFormerConfig.from_size("1M", compose={"key_wise": False}),
        DataSettings(vocab_size=2048),
        TrainSettings(out="runs/query_wise_only", steps=200, learning_rate=6e-3),
        seeds=2,
        console=Console(),
    )
    print(report["verdict"])


if __name__ == "__main__":
    main()
