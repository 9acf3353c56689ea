"""What every request passes first: the count, the key, and the limit on its body."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layertap.server.http_errors import ApiError
from layertap.server.metrics import Metrics

OPEN_PATHS = ("/health", "/ping", "/metrics", "/version", "/openapi.json", "/docs")
_DRAIN_SECONDS = 5.0
_DRAIN_FACTOR = 8


class Gate:
    """Outermost middleware.

    Args:
        api_keys: accepted bearer tokens; none lets everyone in.
        max_body_bytes: larger bodies get 413.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = [0]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._pass(scope, receive, counted)
        finally:
            self._metrics.in_flight.dec()
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.http.labels(method, route, str(status[0])).inc()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if (
            self._keys
            and scope["path"] not in OPEN_PATHS
            and not self._knows(headers.get("authorization", ""))
        ):
            error = ApiError(
                401,
                "missing or wrong API key: send 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        most = self._max_body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            await _drain(receive, most * _DRAIN_FACTOR)
            await self._too_large(f"{length} bytes").response()(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > most:
                    error = self._too_large(f"more than {most} bytes")
                    raise HTTPException(413, error.message)
            return message

        await self._app(scope, limited, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode("utf-8", "replace")
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _too_large(self, size: str) -> ApiError:
        return ApiError(
            413,
            f"the body has {size}; at most {self._max_body_bytes} are taken (--max-body-bytes)",
            code="too_large",
        )


_METHODS = {"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"}


async def _drain(receive: Receive, most: int) -> None:
    """Read on for a while: a client that is cut off while it sends does not see why."""
    deadline = time.monotonic() + _DRAIN_SECONDS
    seen = 0
    while seen < most and (left := deadline - time.monotonic()) > 0:
        try:
            message: dict[str, Any] = dict(await asyncio.wait_for(receive(), left))
        except TimeoutError:
            return
        if message["type"] != "http.request" or not message.get("more_body"):
            return
        seen += len(message.get("body", b""))
