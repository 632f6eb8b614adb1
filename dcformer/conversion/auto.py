"""Lets `AutoConfig` find `dc_llama` and its like, whose classes are made when they are first asked for."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PREFIX = "dc_"


class _OnDemand(dict):
    """Registered configurations, and those of converted models."""

    def __contains__(self, model_type: object) -> bool:
        if super().__contains__(model_type):
            return True
        name = model_type.removeprefix(PREFIX) if isinstance(model_type, str) else model_type
        return name != model_type and name in CONFIG_MAPPING._mapping

    def __missing__(self, model_type: str) -> Any:
        if model_type not in self:
            raise KeyError(model_type)
        from dcformer.conversion.classes import register

        self[model_type] = register(model_type.removeprefix(PREFIX))
        return self[model_type]


CONFIG_MAPPING._extra_content = _OnDemand(CONFIG_MAPPING._extra_content)
