"""Connections whose clients take too long over the head of a request, or send none, are closed.

uvicorn limits how long a connection is idle after a response, but not how long a head takes. Bodies have the same limit
in ``access``, where they get an answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from anabranch.serve.service import Service

__all__ = ["Connection"]


class Connection(H11Protocol):
    """A connection of uvicorn's, closed where a head takes longer than ``body_seconds``.

    The time runs from the beginning of the connection, and later from the first byte of each head.
    """

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a head, and no longer once it is there."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end()
        elif self._limit is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._end()
        super().connection_lost(exc)

    def _wait(self) -> None:
        service: Service = self.config.app.state.service  # type: ignore[union-attr]
        self._limit = self.loop.call_later(service.settings.body_seconds, self.transport.close)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
