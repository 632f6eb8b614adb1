"""Makes transformers' Auto classes know the models after a mere `import dcformer`, without importing transformers for it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_TRIGGER = "transformers.models.auto.configuration_auto"
# Each registers its configuration when it is imported, and its models with the first configuration that is made.
_CONFIGURATIONS = (
    "dcformer.models.dcformer.configuration_dcformer",
    "dcformer.models.dcpythia.configuration_dcpythia",
    "dcformer.conversion.auto",
)


def _register() -> None:
    for name in _CONFIGURATIONS:
        try:
            import_module(name)
        except ImportError as error:
            warnings.warn(f"dcformer's models are not registered with transformers: {error}", stacklevel=2)


class _AfterImport(MetaPathFinder):
    """Lets the usual finder find the trigger, and registers once it has run."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_then_register(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            _register()

        spec.loader.exec_module = run_then_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Registers now if transformers' Auto classes are there, else as soon as they are."""
    if _TRIGGER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport())
