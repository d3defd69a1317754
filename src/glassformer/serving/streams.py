"""Answers as JSON and as server-sent events, and work that is cancelled when its client goes. Torch is not imported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from typing import Any

from starlette.responses import Response

from glassformer.serving.guard import Receive, Scope, Send
from glassformer.serving.wire import dumps


class Json(Response):
    """HTTP response with a JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the JSON of `content` in UTF-8."""
        return dumps(content).encode()


class EventStream(Response):
    """HTTP response of server-sent events; their iterator is closed as soon as the client has gone."""

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str]) -> None:
        super().__init__(headers={"x-accel-buffering": "no", **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client goes."""

        async def all_of_them() -> None:
            async for chunk in self.events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with suppress(Gone):  # the connection is closed
            await unless_gone(all_of_them(), receive)


class Gone(Exception):
    """End of work because the client has closed its connection."""


async def unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """Returns the result of `work`; cancels it and raises Gone if the client closes its connection first."""

    async def leaves() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(leaves())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
