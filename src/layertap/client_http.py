"""HTTP with the standard library: one connection for each thread, tries again what may succeed later."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from layertap.errors import InvalidInputError, LayertapError

_AGAIN = {408, 409, 429, 500, 502, 503, 504, 507}
_LONGEST_PAUSE = 20.0


class ServerError(LayertapError):
    """The server's answer to a request was an error.

    Args:
        status: the HTTP status; 0 if there was no answer at all.
        message: what the server said.
        code: its short word for it (``storage_full``, ``engine_died``, ...).
        param: the field that it complains of.
        final: the server says that the same request would fail again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(f"HTTP {status}: {message}" if status else message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.final = final


class Connections:
    """One connection for each thread, and the requests that go over it."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float, retries: int) -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInputError("base_url", base_url, "such as http://localhost:8000")
        self._https = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._retries = retries
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._local = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self.closed = False

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The body of a successful answer. What may succeed later is tried again, with growing pauses.

        Raises:
            ServerError: the last try's error.
        """
        data = None if body is None else json.dumps(body).encode()
        pause = 0.25
        for left in range(self._retries, -1, -1):
            try:
                return self._once(method, path, data)
            except ServerError as error:
                again = error.status in _AGAIN or error.status == 0
                if not again or left == 0 or self.closed or error.final:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("unreachable")

    def _once(self, method: str, path: str, data: bytes | None) -> bytes:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        try:
            connection.request(method, self._prefix + path, body=data, headers=self._headers)
            response = connection.getresponse()
            content: bytes = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            reason = str(error) or type(error).__name__
            raise ServerError(0, f"no answer from {self._host}:{self._port or ''} ({reason})") from error
        if response.status < 400:
            return content
        raise _error_of(response.status, content, response.headers.get("x-should-retry"))

    def _connect(self) -> http.client.HTTPConnection:
        if self._https:
            context = ssl.create_default_context()
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout, context=context
            )
        else:
            made = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        self._open.add(made)
        return made

    def close(self) -> None:
        self.closed = True
        for connection in self._open:
            connection.close()


def _error_of(status: int, content: bytes, should_retry: str | None) -> ServerError:
    final = should_retry == "false"
    try:
        detail = json.loads(content)["error"]
        return ServerError(
            status, str(detail["message"]), str(detail.get("code")), detail.get("param"), final
        )
    except (ValueError, KeyError, TypeError):
        return ServerError(status, content[:200].decode("utf-8", "replace"), final=final)
