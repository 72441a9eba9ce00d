"""The application: routes, middlewares, and the forms of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import Response

from anabranch.api import Model
from anabranch.errors import AnabranchError
from anabranch.serve import chat, completions, info, messages, page, responses
from anabranch.serve.access import Access, Body, Log
from anabranch.serve.failures import RequestError, failure_of
from anabranch.serve.service import Service
from anabranch.serve.settings import Settings, check, is_loopback
from anabranch.serve.wire import failed

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["create_app"]

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")


def create_app(model: Model, settings: Settings | None = None, *, traces: TracerProvider | None = None) -> FastAPI:
    """The server of a model as an ASGI application, for ``uvicorn`` or inside another one.

    traces  where OpenTelemetry's spans go, if its package is installed; None: to the process's provider, if any

    Its lifespan starts and ends the thread that decodes; the model stays open. Nothing else may decode with the model
    meanwhile. Raises what ``settings.check`` and ``settings.keys_of`` raise.
    """
    settings = settings or Settings()
    check(settings)
    service = Service(model, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            service.draining = True
            await service.worker.stop()

    # documentation pages would load scripts from elsewhere
    app = FastAPI(title="anabranch", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    for part in (chat, completions, messages, responses, info, page):
        app.include_router(part.router)
    app.add_exception_handler(AnabranchError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_http)
    # the last one added is the outermost
    app.add_middleware(Body, size=settings.max_body, seconds=settings.body_seconds)
    app.add_middleware(Access, keys=service.keys)
    if not service.keys and is_loopback(settings.host):
        # a web page whose name an attacker lets point here would have another Host
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, *settings.hosts], www_redirect=False)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    if find_spec("opentelemetry") is not None:
        from anabranch.serve.traces import Traces

        app.add_middleware(Traces, service=service, provider=traces, texts=settings.log_prompts)
    app.add_middleware(Log, tokenizer=model.tokenizer if settings.log_prompts else None)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    return failed(failure_of(error), request.url.path)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = dict(error.errors()[0])
    place = ".".join(str(part) for part in first["loc"][1:]) if len(first["loc"]) > 1 else None
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return failed(RequestError(400, f"the body is not JSON: {why}"), request.url.path)
    kind = request.headers.get("content-type", "")
    if place is None and "json" not in kind:  # as of ``curl -d``
        said = f"the body must be sent with the header Content-Type: application/json, got {kind or 'none'}"
    else:
        said = f"{place or 'the body'}: {first['msg'][:1].lower()}{first['msg'][1:]}".replace(" after validation", "")
    return failed(RequestError(400, said, param=None if place is None else place.split(".")[0]), request.url.path)


def _hint(path: str) -> str:
    """The advice for a client whose base URL has no /v1, or two; empty for other paths."""
    base, version, rest = path.rpartition("/v1/")
    if base.endswith("/v1") and f"/v1/{rest}" in ENDPOINTS:
        return f"; leave one /v1 out of the base URL, for /v1/{rest}"
    return f"; let the base URL end in /v1, for /v1{path}" if not version and f"/v1{path}" in ENDPOINTS else ""


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = error.detail
    if error.status_code == 404:
        said = f"there is no {request.url.path} here{_hint(request.url.path)}"
    elif error.status_code == 405:
        said = f"{request.url.path} has no {request.method}"
    return failed(RequestError(error.status_code, str(said), headers=error.headers), request.url.path)
