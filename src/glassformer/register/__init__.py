"""Makes `import glassformer` enough for `AutoModelForCausalLM.from_pretrained(folder)` of a folder of our own family.

`transformers` keeps a table of the configs it knows. Ours is entered at once where the table is loaded already, and
else at the moment it is: until then nothing is imported. The class of models is imported when a config of ours is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TABLE = "transformers.models.auto.configuration_auto"


def hook() -> None:
    """Enters our config into the table of `transformers`, now or when the table is loaded."""
    loaded = sys.modules.get(TABLE)
    if loaded is not None:
        _enter(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _enter(table: ModuleType) -> None:
    from glassformer.register.config import GlassformerConfig

    table.AutoConfig.register(GlassformerConfig.model_type, GlassformerConfig, exist_ok=True)


class _Finder:
    """Waits for one import, steps aside, and adds `_enter` to its end."""

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
                _enter(module)

            spec.loader.exec_module = load_and_enter  # type: ignore[method-assign]
        return spec
