"""Errors as OpenAI's clients expect them: a status, and a body that says what to do."""

from __future__ import annotations

import difflib
import logging
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request

from layertap.errors import ExtractionError, InvalidInputError
from layertap.server.engine import ENGINE_DIED, EngineUnavailableError

logger = logging.getLogger("layertap")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    503: "service_unavailable_error",
    507: "insufficient_storage_error",
}
_STATUS_OF_KIND = {"storage_full": 507, "dtype_overflow": 422, "aborted": 503, ENGINE_DIED: 500}
_SAME_AGAIN = {"not_finite", "all_zero", "dtype_overflow"}
"""Failures that the same request would meet again."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorBody(BaseModel):
    """OpenAI's error body."""

    error: ErrorDetail


class ApiError(Exception):
    """Ends a request with a status and OpenAI's error body.

    Args:
        status: the HTTP status.
        message: one line that says what happened and what to do.
        param: the field that is wrong, if it is one.
        code: a short stable word; the status where there is none.
        headers: more headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @classmethod
    def of(cls, error: InvalidInputError | ExtractionError | EngineUnavailableError) -> ApiError:
        """The HTTP form of one of the package's own errors."""
        if isinstance(error, InvalidInputError):
            return cls(400, str(error), param=error.field)
        if isinstance(error, EngineUnavailableError):
            return cls(503, str(error), code="unavailable", headers={"retry-after": "1"})
        headers = {"x-should-retry": "false"} if error.kind in _SAME_AGAIN else {}
        return cls(_STATUS_OF_KIND.get(error.kind, 500), str(error), code=error.kind, headers=headers)

    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {
            "error": {
                # A message may quote what was sent, and that need not be encodable.
                "message": self.message.encode("utf-8", "backslashreplace").decode(),
                "type": _TYPES.get(self.status, "internal_server_error"),
                "param": self.param and self.param.encode("utf-8", "backslashreplace").decode(),
                "code": self.code or self.status,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def install(app: FastAPI) -> None:
    """Make ``app`` answer every failure in this form."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def own_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, InvalidInputError | ExtractionError | EngineUnavailableError)
        return ApiError.of(error).response()

    async def wrong_body(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _of_validation(request, error).response()

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {})).response()

    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        # Starlette logs it with its traceback after this answer.
        return ApiError(500, "internal error; the server's log has the details").response()

    app.add_exception_handler(ApiError, api_error)
    for own in (InvalidInputError, ExtractionError, EngineUnavailableError):
        app.add_exception_handler(own, own_error)
    app.add_exception_handler(RequestValidationError, wrong_body)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, unforeseen)


def _of_validation(request: Request, error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    location = [str(part) for part in first.get("loc", ()) if part != "body"]
    field = ".".join(location)
    kind = first.get("type", "")
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason} at character {location[-1:]}")
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(location[-1], _fields_of(request), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return ApiError(400, f"{field}: unknown field{hint}", param=field)
    if kind == "missing" and not field:
        return ApiError(400, "the body is missing: send a JSON object with 'content-type: application/json'")
    shown = repr(first.get("input"))
    if len(shown) > 100:
        shown = f"{shown[:80]}... ({len(shown)} characters)"
    got = "" if kind == "missing" else f" (got {shown})"
    return ApiError(400, f"{field or 'body'}: {first.get('msg', 'wrong')}{got}", param=field or None)


def _fields_of(request: Request) -> list[str]:
    route = request.scope.get("route")
    body = getattr(route, "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return list(getattr(model, "model_fields", ()))
