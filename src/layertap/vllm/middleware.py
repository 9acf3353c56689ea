"""Refuses a request whose ``kv_transfer_params`` are wrong before vLLM runs it, with OpenAI's error body.

A connector can only say so at a request's end; this sits in front of vLLM's HTTP server (``--middleware``,
which ``layertap serve --engine vllm`` adds).
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from layertap.errors import InvalidInputError
from layertap.layers import ServedLayers
from layertap.selection import Selection

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions")


class CheckTransferParams:
    """ASGI middleware. What is served comes from the environment (see :mod:`layertap.vllm.launcher`)."""

    def __init__(self, app: App) -> None:
        from layertap.vllm.launcher import SERVED_LAYERS_ENV

        self._app = app
        served = json.loads(os.environ[SERVED_LAYERS_ENV])
        self._served = ServedLayers(tuple(served["ids"]), served["total"])

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST" or scope.get("path") not in PATHS:
            await self._app(scope, receive, send)
            return
        body = b""
        messages: list[Message] = []
        more = True
        while more:
            message = await receive()
            messages.append(message)
            body += message.get("body", b"")
            more = message["type"] == "http.request" and message.get("more_body", False)
        try:
            self._check(body)
        except InvalidInputError as error:
            await _answer_400(send, error)
            return

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _check(self, body: bytes) -> None:
        try:
            request = json.loads(body)
        except ValueError:
            return  # vLLM's to refuse
        if not isinstance(request, dict):
            return
        if request.get("kv_transfer_params") is not None:
            Selection.parse(request["kv_transfer_params"], self._served)
        # vLLM answers with one handle, and only in a whole answer: the others' files would never be found.
        if request.get("stream"):
            raise InvalidInputError("stream", True, "false with engine='vllm': vLLM streams no handle")
        if request.get("n") not in (None, 1):
            raise InvalidInputError("n", request["n"], "1 with engine='vllm': vLLM answers with one handle")
        prompt = request.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            raise InvalidInputError(
                "prompt", f"{len(prompt)} prompts", "one with engine='vllm': vLLM answers with one handle"
            )


async def _answer_400(send: Send, error: InvalidInputError) -> None:
    detail = {"message": str(error), "type": "invalid_request_error", "param": error.field, "code": 400}
    body = json.dumps({"error": detail}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
