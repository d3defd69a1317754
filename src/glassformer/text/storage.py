"""Names of computed data in the cache."""

from __future__ import annotations

import hashlib


def digest(*parts: object) -> str:
    """Returns a stable name for plain values: the first 32 hex digits of SHA-256."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
