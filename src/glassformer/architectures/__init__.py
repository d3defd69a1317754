"""Published models, as functions that return a `ModelConfig`.

A family name (`llama`, `bloom`) is one of its members, for use with a size: `llama@10m` is LLaMA's wiring at ten
million parameters. Each function describes the published model, even if a guide describes it otherwise.
"""

from glassformer.architectures.table import PRESETS, presets

__all__ = ["PRESETS", "presets"]
