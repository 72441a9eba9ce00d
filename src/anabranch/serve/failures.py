"""Errors of requests: a status, a sentence, and the form that each interface gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anabranch.errors import (
    AnabranchError,
    CapabilityError,
    DeviceError,
    InputError,
    OutOfMemoryError,
)

__all__ = ["FAILURES", "STREAMS", "RequestError", "failure_of", "in_form"]

INTERNAL = "the server failed to answer; its log has the reason under this request id"
# by status: OpenAI's type, Anthropic's type
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


# for the OpenAPI document
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": said,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"error": {"type": "object", "required": ["message", "type"]}},
                    "required": ["error"],
                }
            }
        },
    }
    for status, said in (("4XX", "A request that is not served"), ("5XX", "Try again later, or see the server's log"))
}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer, or its events with stream=true", "content": {"text/event-stream": {}}}
}


class RequestError(AnabranchError):
    """A request that is not served.

    status   of HTTP
    param    the field at fault
    code     OpenAI's code, for programs
    retry    seconds after which trying again makes sense
    headers  more headers of the response
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = self._headers if self.retry is None else {"Retry-After": str(self.retry), **self._headers}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def failure_of(error: BaseException) -> RequestError:
    """The failure that an error means for its request; one that is nobody's mistake tells the client nothing."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, InputError | CapabilityError):
        return RequestError(400, str(error))
    if isinstance(error, OutOfMemoryError):
        return RequestError(400, str(error), code="context_length_exceeded")
    if isinstance(error, DeviceError):
        return RequestError(503, str(error), retry=5)
    return RequestError(500, str(error) if isinstance(error, AnabranchError) else INTERNAL)


def in_form(failure: RequestError, path: str) -> dict[str, Any]:
    """The body of a failure, in the form of the interface that ``path`` belongs to."""
    openai, anthropic = TYPES.get(failure.status, ("server_error", "api_error"))
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": {"type": anthropic, "message": str(failure)}}
    return {"error": {"message": str(failure), "type": openai, "param": failure.param, "code": failure.code}}
