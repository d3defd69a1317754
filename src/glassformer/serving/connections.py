"""Connections whose headers must arrive in time."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glassformer.serving.guard import SECONDS_TO_READ


class PatientProtocol(H11Protocol):
    """HTTP/1.1 connection that is closed if the headers of a request take longer than `SECONDS_TO_READ`."""

    seconds = SECONDS_TO_READ
    late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Starts the timer for the headers of the first request."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Reads some bytes. The timer stops once headers are complete, and starts again for the next request."""
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._enough()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._enough()
        elif self.late is None:
            self.late = self.loop.call_later(self.seconds, self.transport.close)

    def _enough(self) -> None:
        if self.late is not None:
            self.late.cancel()
            self.late = None
