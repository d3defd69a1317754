"""Hook that completes the table of configs of `transformers` when that is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"


def hook(load_models: Callable[[], object]) -> None:
    """Adds our config to the table of `transformers`, now or when the table is loaded.

    `load_models` registers the class of models; it is called when a config of ours is read."""
    loaded = sys.modules.get(TABLE)
    if loaded is not None:
        _enter(loaded, load_models)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(load_models))


def _enter(table: ModuleType, load_models: Callable[[], object]) -> None:
    from glassformer.register.config import GlassformerConfig

    GlassformerConfig.load_models = staticmethod(load_models)
    table.AutoConfig.register(GlassformerConfig.model_type, GlassformerConfig, exist_ok=True)


class _Finder:
    """Import finder that waits for the import of `TABLE`, removes itself, and calls `_enter` once the module has
    run."""

    def __init__(self, load_models: Callable[[], object]):
        self.load_models = load_models

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != TABLE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_enter(module: ModuleType) -> None:
                load(module)
                _enter(module, self.load_models)

            spec.loader.exec_module = load_and_enter  # type: ignore[method-assign]
        return spec
