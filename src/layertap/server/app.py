"""The routes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.requests import Request
from starlette.responses import Response

from layertap import __version__
from layertap.errors import InvalidInputError
from layertap.server import http_errors
from layertap.server.answers import Answer
from layertap.server.chat import ChatAnswer
from layertap.server.completions import CompletionAnswer
from layertap.server.disconnect import ClientGoneError, EventStream, unless_disconnected
from layertap.server.http_errors import ApiError, ErrorBody
from layertap.server.middleware import Gate
from layertap.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from layertap.server.service import Service

_PIECE = 1 << 20
_SETTLE_SECONDS = 10.0
"""For aborted calls, when the server ends: an engine that does not answer must not keep it."""
_STARTED = int(time.time())
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 422, 500, 503, 507)
}
router = APIRouter(responses=_ERRORS)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _answer(request: Request, answer: Answer) -> Response:
    flight = await answer.flight()
    if not answer.stream:
        return JSONResponse(await unless_disconnected(request, answer.whole(flight)))
    await flight.__aenter__()
    return EventStream(answer.events(flight), flight.leave)


@router.post("/v1/completions", response_class=JSONResponse)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Prefill prompts, generate, and hand out where the hidden states are."""
    return await _answer(request, CompletionAnswer(_service(request), body))


@router.post("/v1/chat/completions", response_class=JSONResponse)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """The same for a conversation, rendered with the model's chat template."""
    return await _answer(request, ChatAnswer(_service(request), body))


@router.post("/v1/chat/completions/render", response_class=JSONResponse)
async def render(request: Request, body: ChatRequest) -> Response:
    """The token ids that a chat request would run; nothing is run."""
    return JSONResponse(await ChatAnswer(_service(request), body).render())


@router.post("/tokenize", response_class=JSONResponse)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """Token ids of a text, or of chat messages."""
    service = _service(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInputError("prompt", body.prompt, "either a prompt or messages")
    if body.messages is not None:
        prompt = await service.tokenizing.chat(body, body.messages)
    else:
        assert body.prompt is not None
        prompt = await service.tokenizing.text(body.prompt, "prompt", body.add_special_tokens is not False)
    ids = prompt.token_ids
    strings = service.tokenizing.token_strings(ids) if body.return_token_strs else None
    answer = {
        "count": len(ids),
        "max_model_len": service.facts.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    return JSONResponse(answer)


@router.post("/detokenize", response_class=JSONResponse)
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    service = _service(request)
    service.check_model(body.model)
    return JSONResponse({"prompt": await service.tokenizing.decode(body.tokens)})


def _card(service: Service, name: str) -> dict[str, Any]:
    facts = service.facts
    states = None
    if facts.layers is not None:
        states = {
            "layers": list(facts.layers.ids),
            "num_hidden_layers": facts.layers.num_hidden_layers,
            "hidden_size": facts.hidden_size,
            "dtype": facts.dtype,
        }
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "layertap", "root": facts.model,
        "parent": None, "max_model_len": facts.max_model_len, "permission": [], "hidden_states": states,
    }  # fmt: skip


@router.get("/v1/models", response_class=JSONResponse)
async def models(request: Request) -> Response:
    """The served model, under each of its names, and the layers that it hands out."""
    service = _service(request)
    return JSONResponse({"object": "list", "data": [_card(service, name) for name in service.model_names]})


@router.get("/v1/models/{model:path}", response_class=JSONResponse)
async def model(request: Request, model: str) -> Response:
    """One served model."""
    service = _service(request)
    service.check_model(model)
    return JSONResponse(_card(service, model))


def _storage(request: Request) -> Any:
    storage = _service(request).storage
    if storage is None:
        raise ApiError(404, "this server stores no files", code="not_found")
    return storage


@router.get("/v1/hidden_states/{record_id}", response_class=Response)
async def get_hidden_states(request: Request, record_id: str) -> Response:
    """A stored record, as the bytes of its safetensors file."""
    storage = _storage(request)
    fd, size = await asyncio.to_thread(storage.open, record_id)
    opened = os.fdopen(fd, "rb")

    async def pieces() -> AsyncIterator[bytes]:
        with opened as file:
            while piece := await asyncio.to_thread(file.read, _PIECE):
                yield piece

    headers = {
        "content-length": str(size),
        "content-disposition": f'attachment; filename="{record_id}.safetensors"',
    }
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


@router.delete("/v1/hidden_states/{record_id}", response_class=JSONResponse)
async def delete_hidden_states(request: Request, record_id: str) -> Response:
    """Remove a stored record."""
    if not await asyncio.to_thread(_storage(request).delete, record_id):
        raise ApiError(404, f"no hidden states are stored under {record_id!r}", code="not_found")
    return JSONResponse({"id": record_id, "object": "hidden_states.deleted", "deleted": True})


@router.get("/health", response_class=JSONResponse)
@router.get("/ping", response_class=JSONResponse)
async def health(request: Request) -> Response:
    """200 while requests are taken."""
    service = _service(request)
    if not service.engine.ready:
        raise ApiError(503, "the engine is not running", code="unavailable", headers={"retry-after": "1"})
    return JSONResponse({"status": "ok"})


@router.get("/version", response_class=JSONResponse)
async def version() -> Response:
    """The version of this package."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms for Prometheus."""
    text = _service(request).metrics.render()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def build_app(service: Service, api_keys: Sequence[str] = (), root_path: str = "") -> FastAPI:
    """The application over a service. Its lifespan starts the engine and closes it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.engine.start()
        sweeper = asyncio.create_task(service.storage.sweep_forever()) if service.storage else None
        try:
            yield
        finally:
            if sweeper is not None:
                sweeper.cancel()
            await service.settle(_SETTLE_SECONDS)
            await service.engine.close()
            await service.settle(_SETTLE_SECONDS)  # the engine's end has ended the rest

    app = FastAPI(
        title="layertap", version=__version__, lifespan=lifespan, root_path=root_path, redoc_url=None,
        description=__doc__ and "OpenAI's API over a model that hands out its hidden states.",
    )  # fmt: skip
    app.state.service = service
    app.include_router(router)
    http_errors.install(app)

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    app.add_exception_handler(ClientGoneError, client_gone)
    app.add_middleware(
        Gate, metrics=service.metrics, api_keys=api_keys, max_body_bytes=service.limits.max_body_bytes
    )
    return app
