"""Runs the application on uvicorn until SIGTERM or Ctrl-C, which let requests in progress end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import uvicorn

from anabranch.api import Model
from anabranch.errors import InputError
from anabranch.serve.access import LOG, LogLines
from anabranch.serve.app import create_app
from anabranch.serve.connection import Connection
from anabranch.serve.service import Service
from anabranch.serve.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["bound", "serve"]

BACKLOG = 2048
# Seconds for which an idle connection stays open: longer than clients keep theirs (httpx 5, Go 90), so that none sends
# a request on a connection that is being closed.
KEEP_ALIVE = 120
LAST_SECONDS = 5  # in which requests that were cut off take their error; then their connections are closed


def bound(settings: Settings) -> socket.socket:
    """A socket at the server's address. Raises InputError if it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # with the protocol named: asyncio sets TCP_NODELAY on no others, and small events would wait for acknowledgements
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise InputError(
            f"cannot listen on {settings.host} port {settings.port} ({error.strerror or error}); give another --host "
            "or --port"
        ) from error
    return made


def serve(model: Model, settings: Settings, listening: socket.socket, ready: Callable[[str, str], None]) -> None:
    """Serve a model at a socket until a signal comes.

    ``ready`` is called with the URL and the model's name once requests are taken. Requests that run at the signal have
    ``drain_seconds`` to end; then they get an error. Logs are lines of JSON on standard error.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines())
    for logger in (LOG, logging.getLogger("uvicorn.error")):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    traces = _traces()
    app = create_app(model, settings, traces=traces)
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=settings.drain_seconds + LAST_SECONDS,
        lifespan="on",
    )
    service: Service = app.state.service
    server = _Server(config, lambda: ready(_url(listening), service.names[0]), service)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
        if traces is not None:
            traces.shutdown()  # exports what is left


def _traces() -> TracerProvider | None:
    if find_spec("opentelemetry") is None:
        return None
    from anabranch.serve.traces import exporting

    return exporting()


class _Server(uvicorn.Server):
    """Tells when it takes requests, and lets those that run end in time."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], service: Service) -> None:
        super().__init__(config)
        self._ready, self._service = ready, service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        # what still decodes then ends with an error in its interface's form; uvicorn would only close its connection
        asyncio.get_running_loop().call_later(self._service.settings.drain_seconds, self._service.worker.end)
        await super().shutdown(sockets)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
