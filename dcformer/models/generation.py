"""Generation with caches that hold more than keys and values."""

from __future__ import annotations

from typing import Any

from transformers.generation import GenerationMixin

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
        """As in transformers. The manager makes its cache later, and only meanwhile `config.head_dim` is the packed width."""
        manager = super().init_continuous_batching(*args, **kwargs)
        make, head_dim, width = type(manager)._create_batch_processor, self.config.head_dim, packed_width(self.config)

        def make_packed() -> Any:
            self.config.head_dim = width
            try:
                return make(manager)
            finally:
                self.config.head_dim = head_dim

        manager._create_batch_processor = make_packed  # type: ignore[method-assign]
        return manager
