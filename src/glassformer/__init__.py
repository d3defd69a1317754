"""Transformers under glass: compose any of them, train it, run it, look inside it, and know what every choice costs.

>>> import glassformer as gf
>>> model = gf.preset("llama@10m+gqa:2").build(seed=0)

Names are imported when first used, so `import glassformer` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glassformer.architectures import presets as presets
    from glassformer.comparison import Comparison as Comparison
    from glassformer.comparison import Design as Design
    from glassformer.comparison import compare as compare
    from glassformer.comparison import train as train
    from glassformer.comparison import tune as tune
    from glassformer.config import ModelConfig as ModelConfig
    from glassformer.conversion import save as save
    from glassformer.generation import Sampling as Sampling
    from glassformer.generation import generate as generate
    from glassformer.generation import stream as stream
    from glassformer.generation.session import Completion as Completion
    from glassformer.generation.session import Session as Session
    from glassformer.introspection import capture as capture
    from glassformer.introspection import edit as edit
    from glassformer.laboratory import fit_scaling_law as fit_scaling_law
    from glassformer.laboratory.advice import advise as advise
    from glassformer.laboratory.claims import claims as claims
    from glassformer.laboratory.ladder import ablate as ablate
    from glassformer.laboratory.scaling import scale as scale
    from glassformer.loaded import Loaded as Loaded
    from glassformer.naming import preset as preset
    from glassformer.naming.loading import load as load
    from glassformer.planning import plan as plan
    from glassformer.retrieval import ask as ask
    from glassformer.retrieval import embed as embed
    from glassformer.retrieval import index as index
    from glassformer.training import Callback as Callback
    from glassformer.training import Recipe as Recipe
    from glassformer.training import Run as Run
    from glassformer.training import fast_training as fast_training
    from glassformer.training.post_mortem import why as why
    from glassformer.version import __version__ as __version__

_HOMES = {
    "Callback": "training",
    "Completion": "generation.session",
    "Loaded": "loaded",
    "Comparison": "comparison",
    "Design": "comparison",
    "ModelConfig": "config",
    "Recipe": "training",
    "Run": "training",
    "Sampling": "generation",
    "Session": "generation.session",
    "__version__": "version",
    "ablate": "laboratory.ladder",
    "advise": "laboratory.advice",
    "ask": "retrieval",
    "capture": "introspection",
    "claims": "laboratory.claims",
    "compare": "comparison",
    "dynamics": "dynamics",
    "edit": "introspection",
    "embed": "retrieval",
    "fast_training": "training",
    "fit_scaling_law": "laboratory",
    "generate": "generation",
    "index": "retrieval",
    "lens": "lens",
    "load": "naming.loading",
    "plan": "planning",
    "preset": "naming",
    "presets": "architectures",
    "scale": "laboratory.scaling",
    "stream": "generation",
    "train": "comparison",
    "tune": "comparison",
    "why": "training.post_mortem",
}
"""Where each public name is defined. No name of a function is the name of a module: both could not be attributes."""

__all__ = [
    "Callback",
    "Completion",
    "Loaded",
    "Comparison",
    "Design",
    "ModelConfig",
    "Recipe",
    "Run",
    "Sampling",
    "Session",
    "ablate",
    "advise",
    "ask",
    "capture",
    "claims",
    "compare",
    "dynamics",
    "edit",
    "embed",
    "fast_training",
    "fit_scaling_law",
    "generate",
    "index",
    "lens",
    "load",
    "plan",
    "preset",
    "presets",
    "save",
    "scale",
    "stream",
    "train",
    "tune",
    "why",
]


if not TYPE_CHECKING:  # not lazily by name: nnsight gives every object, and so every module, a method `save`

    def save(
        model, tokenizer, folder, *, dtype=None, trained=None, family=None, ends=None, generation=None, pooling=None
    ):
        """Writes the folder that `AutoModelForCausalLM.from_pretrained` loads, as `family` (a model_type) or the first
        that can hold the model; returns which.

        A model that no published class can hold is written as our own, which `transformers` loads once `glassformer` is
        imported. Reparametrised matrices are written as they are applied. `trained` goes into the model card. `ends`
        are the ids at which an answer ends; if None, those of the model, or the tokenizer's own. `generation` is how
        it is drawn, as `load` gives it, and a run its `generation`. `pooling`, as `load` gives it, makes it a folder of
        sentence-transformers too. Raises RequestError."""
        save = import_module("glassformer.conversion").save
        return save(
            model,
            tokenizer,
            folder,
            dtype=dtype,
            trained=trained,
            family=family,
            ends=ends,
            generation=generation,
            pooling=pooling,
        )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'glassformer' has no attribute {name!r}")
    home = import_module(f"glassformer.{_HOMES[name]}")
    value = home if _HOMES[name] == name else getattr(home, name)
    globals()[name] = value
    return value


# `transformers` then loads models of our own family.
import_module("glassformer.register").hook(lambda: import_module("glassformer.conversion.transformers"))
