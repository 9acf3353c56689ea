"""How an answer is put together from the engine's outputs; completions and chat differ in their choices."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from layertap.errors import ExtractionError
from layertap.outputs import CompletionOutput, RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams
from layertap.server.deltas import Delta, DeltaTracker
from layertap.server.http_errors import ApiError
from layertap.server.requests import ChatRequest, CompletionRequest
from layertap.server.sampling import refuse_unsupported, sampling_params
from layertap.server.service import Flight, Service
from layertap.server.tokenizing import truncate


class Answer(ABC):
    """One request's way from its body to its answer."""

    prefix: str
    """Of the answer's id."""
    object_name: str
    chunk_name: str

    def __init__(self, service: Service, body: CompletionRequest | ChatRequest) -> None:
        self.service = service
        self.model = service.check_model(body.model)
        refuse_unsupported(body)
        self.id, self.stem = service.request_names(self.prefix, body.request_id)
        self.created = int(time.time())
        self.transfer, self.inline = service.transfer_params(body.kv_transfer_params)
        self.stream = bool(body.stream)
        self.with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self.token_ids = bool(body.return_token_ids)
        self.as_ids = bool(body.return_tokens_as_token_ids)
        self.cache_salt = body.cache_salt or ""
        self._body = body

    @abstractmethod
    async def prompts(self) -> list[TokenizedPrompt]:
        """The request's prompts as token ids."""

    @abstractmethod
    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """One finished sequence."""

    @abstractmethod
    def chunk_choices(
        self, delta: Delta, prompt: TokenizedPrompt, output: RequestOutput
    ) -> list[dict[str, Any]]:
        """One sequence's news as choices of chunks, in order."""

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """More fields at the top level of a whole answer."""
        return {}

    def chunk_extras(self, delta: Delta, prompt: TokenizedPrompt) -> dict[str, Any]:
        """More fields at the top level of a chunk."""
        return {}

    async def flight(self) -> Flight:
        """Everything checked, nothing submitted.

        Raises:
            InvalidInputError: naming the field that is wrong.
        """
        body, service = self._body, self.service
        most = service.facts.max_model_len
        items: list[tuple[TokenizedPrompt, SamplingParams]] = []
        side = getattr(service.tokenizing.tokenizer, "truncation_side", None) or "left"
        for prompt in await self.prompts():
            cut = truncate(prompt, body.truncate_prompt_tokens, body.truncation_side, side, most)
            params = sampling_params(
                body, len(cut.token_ids), self.transfer, most, service.limits.max_logprobs
            )
            items.append((cut, params))
        flight = service.flight(self.stem, items, stream=self.stream, cache_salt=self.cache_salt)
        if self.inline:
            flight.check_inline()
        return flight

    async def whole(self, flight: Flight) -> dict[str, Any]:
        """The answer in one piece.

        Raises:
            ExtractionError: a sequence failed; nothing of the request stays.
        """
        async with flight:
            outputs = await flight.finals()
            choices: list[dict[str, Any]] = []
            for output in outputs:
                for completion in output.outputs:
                    choice = self.choice(len(choices), output, completion)
                    choice["kv_transfer_params"] = await flight.handle(
                        completion.kv_transfer_params, self.inline
                    )
                    choices.append(choice)
            for i in range(len(outputs)):
                flight.delivered(i)
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage(outputs),
            "system_fingerprint": None,
            "kv_transfer_params": choices[0]["kv_transfer_params"],
            **self.extras(outputs),
        }

    async def events(self, flight: Flight) -> AsyncGenerator[str, None]:
        """The answer as the data of server-sent events. The flight has been entered."""
        last: dict[int, RequestOutput] = {}
        try:
            tracker = DeltaTracker(list(flight.calls))
            async for call, output in flight.outputs():
                if output.error is not None:
                    raise output.error
                prompt = flight.calls[call].prompt
                for delta in tracker.news(call, output):
                    handle = await flight.handle(delta.kv_transfer_params, self.inline)
                    extras = self.chunk_extras(delta, prompt)
                    for choice in self.chunk_choices(delta, prompt, output):
                        top = dict(extras)
                        if handle is not None and choice.get("finish_reason") is not None:
                            choice["kv_transfer_params"] = top["kv_transfer_params"] = handle
                        yield self._chunk([choice], top)
                if output.finished:
                    flight.delivered(call)
                    last[call] = output
            if self.with_usage:
                yield self._chunk([], {"usage": usage([last[i] for i in sorted(last)])})
        except ExtractionError as error:
            yield json.dumps(ApiError.of(error).body())
        yield "[DONE]"

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any]) -> str:
        chunk = {
            "id": self.id, "object": self.chunk_name, "created": self.created, "model": self.model,
            "choices": choices, **more,
        }  # fmt: skip
        return json.dumps(chunk, ensure_ascii=False)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    completion = sum(len(c.token_ids) for o in outputs for c in o.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.num_cached_tokens for o in outputs)},
    }
