"""Pages made by the library, kept for the frames that show them."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

KEPT = 8
"""Largest number of pages that are kept."""


class PageShelf:
    """Store of pages made by the library, under names that cannot be guessed; the oldest page is dropped first."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, str] = OrderedDict()
        self._changing = threading.Lock()

    def put(self, page: str) -> str:
        """Stores a page; returns its name."""
        name = secrets.token_urlsafe(12)
        with self._changing:
            self._pages[name] = page
            while len(self._pages) > KEPT:
                self._pages.popitem(last=False)
        return name

    def get(self, name: str) -> str | None:
        """Returns the page of a name; None if it was dropped or never stored."""
        return self._pages.get(name)
