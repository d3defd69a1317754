"""Pages made by the library, kept for the frames that show them."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict

KEPT = 8
"""Number of pages."""


class PageShelf:
    """Pages made by the library, by a name that cannot be guessed; the oldest go first."""

    def __init__(self) -> None:
        self._pages: OrderedDict[str, str] = OrderedDict()
        self._changing = threading.Lock()

    def put(self, page: str) -> str:
        """Keeps a page and returns its name."""
        name = secrets.token_urlsafe(12)
        with self._changing:
            self._pages[name] = page
            while len(self._pages) > KEPT:
                self._pages.popitem(last=False)
        return name

    def get(self, name: str) -> str | None:
        """Returns a page; None if it is gone."""
        return self._pages.get(name)
