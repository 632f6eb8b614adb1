"""How `dcformer serve` loads a model. The process that serves it gets a copy of the loader, and imports dcformer with it."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM
from transformers.cli.serving.model_manager import ModelLoader
from transformers.cli.serving.utils import parse_model_id


class Loader(ModelLoader):
    """That of transformers, which looks for classes among its own only, with all models that are registered."""

    def _load_model(self, model_id: str, tqdm_class: type | None = None, progress_callback: Any = None) -> Any:
        repo, revision, gguf_file = parse_model_id(model_id)
        return AutoModelForCausalLM.from_pretrained(
            repo,
            revision=revision,
            gguf_file=gguf_file,
            attn_implementation=self.attn_implementation,
            dtype=self.dtype,
            device_map=self.device,
            trust_remote_code=self.trust_remote_code,
            quantization_config=self.get_quantization_config(),
            tqdm_class=tqdm_class,
        )
