"""Names of computed texts in the cache, and reports of progress."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

OnProgress = Callable[[str, int, int | None], None]
"""`progress(stage, done, total)`; `total` is None where it is not known beforehand."""


def silent(stage: str, done: int, total: int | None) -> None:
    """The progress callback of those who did not bring one."""


def digest(*parts: object) -> str:
    """A short stable name for a tuple of plain values: the first 32 hex digits of SHA-256."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
