"""Where this program keeps what can be made again."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

MOST = 1 << 20
"""Bytes of a file of measurements."""


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else `$GLASSFORMER_CACHE`, else `~/.cache/glassformer`."""
    named = cache_dir or os.environ.get("GLASSFORMER_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "glassformer"


def remembered(file: str, key: str) -> Any:
    """What was measured and kept as `key` in a file of the cache folder; None where nothing was, or the file is too
    large or damaged. Whatever is found is to be checked: anybody may have written it."""
    return _known(file).get(key)


def remember(file: str, key: str, value: Any) -> None:
    """Keeps a measurement for later processes, as the last of its file; the first go where there is no room. Nothing
    happens where the folder cannot be written: it is measured again next time."""
    known = _known(file)
    known.pop(key, None)
    known[key] = value
    while len(text := json.dumps(known)) > MOST and len(known) > 1:
        known.pop(next(iter(known)))
    temporary = None
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as made:
            temporary = made.name
            made.write(text)
        os.replace(temporary, folder / file)
    except (OSError, RuntimeError):  # no room, no right, no home
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _known(file: str) -> dict[str, Any]:
    try:
        path = cache_folder() / file
        known = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= MOST else None
    except (OSError, ValueError, RuntimeError):
        return {}
    return known if isinstance(known, dict) else {}
