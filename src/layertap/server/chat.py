"""``/v1/chat/completions`` and its render: what their answers look like."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from layertap.outputs import CompletionOutput, RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.server.answers import Answer
from layertap.server.deltas import Delta
from layertap.server.logprobs import chat_logprobs, prompt_logprobs
from layertap.server.requests import ChatRequest
from layertap.server.service import Service


class ChatAnswer(Answer):
    """A chat completion."""

    prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body)
        self.body = body
        # With `echo`, the answer repeats the message that it continues.
        last = body.messages[-1].get("content") if body.echo else None
        self.before = last if isinstance(last, str) else ""

    async def prompts(self) -> list[TokenizedPrompt]:
        return [await self.service.tokenizing.chat(self.body, self.body.messages)]

    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs:
            rows = completion.logprobs or []
            logprobs = chat_logprobs(rows, completion.token_ids, self.body.top_logprobs or 0, self.as_ids)
        return {
            "index": index,
            "message": {"role": "assistant", "content": self.before + completion.text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if self.token_ids else None,
        }

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        rows = outputs[0].prompt_logprobs if self.body.prompt_logprobs is not None else None
        return {
            "prompt_token_ids": outputs[0].prompt_token_ids if self.token_ids else None,
            "prompt_logprobs": prompt_logprobs(rows),
        }

    def chunk_choices(
        self, delta: Delta, prompt: TokenizedPrompt, output: RequestOutput
    ) -> list[dict[str, Any]]:
        choices = []
        if delta.first:
            choices.append(self._chunk_choice(delta.index, {"role": "assistant", "content": self.before}))
        news = self._chunk_choice(delta.index, {"content": delta.text} if delta.text else {})
        if self.body.logprobs and delta.logprobs:
            top = self.body.top_logprobs or 0
            news["logprobs"] = chat_logprobs(delta.logprobs, delta.token_ids, top, self.as_ids)
        news["finish_reason"] = delta.finish_reason
        news["stop_reason"] = delta.stop_reason
        if self.token_ids:
            news["token_ids"] = delta.token_ids
        return [*choices, news]

    @staticmethod
    def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk_extras(self, delta: Delta, prompt: TokenizedPrompt) -> dict[str, Any]:
        return {"prompt_token_ids": prompt.token_ids} if self.token_ids and delta.first else {}

    async def render(self) -> dict[str, Any]:
        """vLLM's ``GenerateRequest``: what would be run, and nothing is."""
        flight = await self.flight()
        call = flight.calls[0]
        params = {
            f.name: getattr(call.params, f.name)
            for f in dataclasses.fields(call.params)
            if f.init and f.name not in ("kv_transfer_params", "extra_args")
        }
        return {
            "request_id": self.id,
            "token_ids": call.prompt.token_ids,
            "sampling_params": params,
            "model": self.model,
            "stream": self.stream,
            "cache_salt": self.body.cache_salt,
            "priority": 0,
            "kv_transfer_params": self.transfer,
            "features": None,
            "token_offsets": None,
        }
