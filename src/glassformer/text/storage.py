"""Names of computed texts in the cache."""

from __future__ import annotations

import hashlib


def digest(*parts: object) -> str:
    """Returns a short stable name for a tuple of plain values: the first 32 hex digits of SHA-256."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
