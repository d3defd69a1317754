"""Server-sent events: comments in pauses, and generators closed once the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("starlette")

from glassformer.serving import streams
from glassformer.serving.streams import EventStream

EVENTS = [b"data: 1\n\n", b"data: 2\n\n"]


async def sent(events: AsyncGenerator[bytes, None], gone_after: float | None = None) -> list[dict[str, Any]]:
    """Returns the messages that a stream sends to a client that leaves after some seconds, if at all."""
    messages: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60 if gone_after is None else gone_after)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    await asyncio.wait_for(EventStream(events, {})({"type": "http"}, receive, send), 30)  # type: ignore[arg-type]
    return messages


def test_silent_stream_sends_comments_between_events_and_none_after_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING", 0.05)

    async def slow() -> AsyncGenerator[bytes, None]:
        for one in EVENTS:
            await asyncio.sleep(0.3)
            yield one

    messages = asyncio.run(sent(slow()))
    bodies = [one["body"] for one in messages[1:]]
    comments = [body for body in bodies if body.startswith(b":")]
    assert [body for body in bodies if body not in comments] == [*EVENTS, b""] and len(comments) >= 2
    assert bodies[-1] == b"" and not messages[-1].get("more_body")


def test_stream_with_frequent_events_sends_no_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING", 5.0)

    async def steady() -> AsyncGenerator[bytes, None]:
        for one in EVENTS:
            yield one

    assert [one["body"] for one in asyncio.run(sent(steady()))[1:]] == [*EVENTS, b""]


def test_generator_is_closed_once_the_client_has_gone() -> None:
    closed = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield EVENTS[0]
                await asyncio.sleep(0.01)
        finally:
            closed.append(True)

    messages = asyncio.run(sent(endless(), gone_after=0.1))
    assert closed and messages[-1]["more_body"]
