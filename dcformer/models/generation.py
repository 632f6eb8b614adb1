"""Generation with caches that hold more than keys and values."""

from __future__ import annotations

from typing import Any

from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching.utils import find_head_dim

from dcformer.models.attention import packed_width


class PackedGenerationMixin(GenerationMixin):
    """`GenerationMixin` for models whose caches hold what `dcformer.models.attention.pack` makes.

    A cache that is made before the first keys arrive takes the width of a head from `config.head_dim`; what it gets is wider.
    """

    config: Any

    def _get_static_cache_init_shape(self) -> tuple | None:
        shape = super()._get_static_cache_init_shape()  # type: ignore[misc]  # transformers annotates self by a protocol
        return shape and (shape[0], packed_width(self.config))

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        manager = super().init_continuous_batching(*args, **kwargs)
        return widen_paged_cache(manager, self.config, packed_width(self.config) - self.config.head_dim)


def widen_paged_cache(manager: Any, config: Any, channels: int) -> Any:
    """A manager of continuous batching whose cache has more channels than a head.

    It makes its cache later, and only meanwhile `config.head_dim` is the packed width.

    Args:
        manager: of transformers.
        config: that of the text model.
        channels: how many more.

    Returns:
        `manager`.
    """
    make, before = type(manager)._create_batch_processor, vars(config).get("head_dim")

    def make_packed() -> Any:
        config.head_dim = find_head_dim(config) + channels
        try:
            return make(manager)
        finally:
            if before is None:
                del config.head_dim
            else:
                config.head_dim = before

    manager._create_batch_processor = make_packed
    return manager
