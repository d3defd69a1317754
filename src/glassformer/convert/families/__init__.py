"""The published families, one file each. A new one is a file with a FAMILY, named in the table here."""

from __future__ import annotations

from glassformer.convert.families import gpt2, llama
from glassformer.convert.family import Family

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in (llama, gpt2)}
"""model_type -> family. Where several can hold a config, the first is the one it is written as."""
