"""The one thread that answers questions about configs, so that warnings that are held back are those of one question,
and torch is imported while the page is drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from glassformer.serving.guard import Receive
from glassformer.serving.streams import unless_gone


class Desk:
    """Thread that answers questions, which are functions, one at a time, with a queue before it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="desk")

    def prepare(self, question: Callable[[], object]) -> None:
        """Adds a question whose answer the function caches, and does not wait for it."""
        self._thread.submit(question)

    async def answer(self, question: Callable[[], Any], receive: Receive) -> Any:
        """Returns the answer to a question; if the client closes its connection first, drops the question and raises
        Gone."""

        async def asked() -> Any:
            return await asyncio.get_running_loop().run_in_executor(self._thread, question)

        return await unless_gone(asked(), receive)

    def close(self) -> None:
        """Ends the thread and drops the questions that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)
