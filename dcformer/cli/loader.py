"""How `dcformer serve` loads a model. The process that serves it gets a copy of the loader, and imports dcformer with it."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoModelForCausalLM
from transformers.cli.serving.model_manager import ModelLoader
from transformers.cli.serving.utils import parse_model_id


class Loader(ModelLoader):
    """That of transformers, which looks for classes among its own only, and beside it all models that are registered."""

    def _load_model(self, model_id: str, tqdm_class: type | None = None, progress_callback: Any = None) -> Any:
        config, _ = self.load_config(model_id)
        if not config.architectures or hasattr(transformers, config.architectures[0]):
            return super()._load_model(model_id, tqdm_class, progress_callback)
        repo, revision, _ = parse_model_id(model_id)
        return AutoModelForCausalLM.from_pretrained(
            repo,
            revision=revision,
            attn_implementation=self.attn_implementation,
            dtype=self.dtype,
            device_map=self.device,
            trust_remote_code=self.trust_remote_code,
            quantization_config=self.get_quantization_config(),
            tqdm_class=tqdm_class,
        )
