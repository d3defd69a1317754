"""Answers as JSON and as server-sent events, and work that is cancelled when its client goes. Torch is not imported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
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


PING = 15.0
"""Seconds without an event after which a stream sends a comment, so that its connection stays open."""


class EventStream(Response):
    """HTTP response of server-sent events, with comments in pauses; their generator is closed as soon as the
    client has gone."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        super().__init__(headers={"x-accel-buffering": "no", **headers}, media_type="text/event-stream")
        del self.headers["content-length"]
        self.events = events
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client goes."""
        clock = asyncio.get_running_loop().time

        async def all_of_them() -> None:
            async with aclosing(self.events) as events:
                async for chunk in events:
                    self._last = clock()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            comments.cancel()
            await send({"type": "http.response.body", "body": b""})

        async def while_silent() -> None:
            while True:
                await asyncio.sleep(max(0.0, self._last + PING - clock()))
                if clock() >= self._last + PING:
                    self._last = clock()
                    await send({"type": "http.response.body", "body": b": still computing\n\n", "more_body": True})

        self._last = clock()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        comments = asyncio.ensure_future(while_silent())
        try:
            with suppress(Gone):  # the connection is closed
                await unless_gone(all_of_them(), receive)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)


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
