"""Transformers under glass: compose any of them, train it, run it, look inside it, and know what every choice costs.

>>> import glassformer as gf
>>> model = gf.preset("llama@10m+gqa:2").build(seed=0)

Names are imported when first used, so `import glassformer` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.capture import capture as capture
    from glassformer.capture import edit as edit
    from glassformer.compare import compare as compare
    from glassformer.config import ModelConfig as ModelConfig
    from glassformer.convert import save as save
    from glassformer.expression import load as load
    from glassformer.expression import preset as preset
    from glassformer.generate import generate as generate
    from glassformer.generate import stream as stream
    from glassformer.plan import plan as plan
    from glassformer.presets import presets as presets
    from glassformer.train import train as train

__version__ = "0.1.0"

_HOMES = {
    "ModelConfig": "config",
    "capture": "capture",
    "compare": "compare",
    "dynamics": "dynamics",
    "edit": "capture",
    "generate": "generate",
    "lens": "lens",
    "load": "expression",
    "plan": "plan",
    "preset": "expression",
    "presets": "presets",
    "stream": "generate",
    "train": "train",
}

__all__ = [
    "ModelConfig",
    "capture",
    "compare",
    "dynamics",
    "edit",
    "generate",
    "lens",
    "load",
    "plan",
    "preset",
    "presets",
    "save",
    "stream",
    "train",
]


if not TYPE_CHECKING:  # not lazily by name: nnsight gives every object, and so every module, a method `save`

    def save(*args: Any, **kwargs: Any) -> Any:
        """See `glassformer.convert.save`."""
        return import_module("glassformer.convert").save(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glassformer' has no attribute {name!r}")
    home = import_module(f"glassformer.{_HOMES[name]}")
    value = home if _HOMES[name] == name else getattr(home, name)  # a module called by its own name is callable
    globals()[name] = value
    return value


import_module("glassformer.register").hook()  # `transformers` then loads models of our own family
