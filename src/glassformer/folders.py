"""Where this program keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else `$GLASSFORMER_CACHE`, else `~/.cache/glassformer`."""
    named = cache_dir or os.environ.get("GLASSFORMER_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "glassformer"
