"""Conversion of published checkpoints: `gf.load`, `gf.save`."""

from glassformer.conversion.checkpoints import (
    adapt,
    is_checkpoint,
    locate,
    pack,
    read_checkpoint,
    read_config,
    refuse_weights,
    save,
)

__all__ = [
    "adapt", "is_checkpoint", "locate", "pack", "read_checkpoint", "read_config", "refuse_weights", "save",
]  # fmt: skip
