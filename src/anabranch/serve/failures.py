"""Errors of requests: a status, a sentence, and the form that each interface gives them."""

from __future__ import annotations

from typing import Any

from anabranch.errors import (
    AnabranchError,
    CapabilityError,
    DeviceError,
    InputError,
    OutOfMemoryError,
)

__all__ = ["RequestError", "failure_of", "in_form"]

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
    501: ("invalid_request_error", "invalid_request_error"),
    503: ("server_error", "overloaded_error"),
    504: ("timeout_error", "timeout_error"),
}


class RequestError(AnabranchError):
    """A request that is not served.

    status  of HTTP
    param   the field at fault
    code    OpenAI's code, for programs
    retry   seconds after which trying again makes sense
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry = status, param, code, retry

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
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
