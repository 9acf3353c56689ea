"""``/v1/completions``: what its choices look like."""

from __future__ import annotations

from typing import Any

from layertap.outputs import CompletionOutput, RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.server.answers import Answer
from layertap.server.deltas import Delta
from layertap.server.logprobs import completion_logprobs, prompt_logprobs
from layertap.server.requests import CompletionRequest
from layertap.server.service import Service


class CompletionAnswer(Answer):
    """A completion."""

    prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        super().__init__(service, body)
        self.body = body
        self.echo = bool(body.echo)

    async def prompts(self) -> list[TokenizedPrompt]:
        return await self.service.tokenizing.completion_prompts(
            self.body.prompt, self.body.add_special_tokens is not False
        )

    def _prompt_text(self, prompt: str | None, token_ids: list[int]) -> str:
        if prompt is not None:
            return prompt
        tokenizer = self.service.tokenizing.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(token_ids))

    def _prompt_token_texts(self, token_ids: list[int]) -> list[str]:
        tokenizer = self.service.tokenizing.tokenizer
        return ["" if tokenizer is None else str(tokenizer.decode([t])) for t in token_ids]

    def _logprobs(
        self, rows: list[Any], tokens: list[int], texts: list[str], offset: int
    ) -> dict[str, Any] | None:
        return completion_logprobs(rows, tokens, texts, offset, self.as_ids)

    def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        text = completion.text
        rows: list[Any] = list(completion.logprobs or [])
        tokens = list(completion.token_ids)
        texts = [row[t].decoded_token or "" for row, t in zip(rows, tokens, strict=False)]
        if self.echo:
            text = self._prompt_text(output.prompt, output.prompt_token_ids) + text
            rows = [*(output.prompt_logprobs or []), *rows]
            tokens = [*output.prompt_token_ids, *tokens]
            texts = [*self._prompt_token_texts(output.prompt_token_ids), *texts]
        return {
            "index": index,
            "text": text,
            "logprobs": None if self.body.logprobs is None else self._logprobs(rows, tokens, texts, 0),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": list(completion.token_ids) if self.token_ids else None,
            "prompt_token_ids": output.prompt_token_ids if self.token_ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs)
            if self.body.prompt_logprobs is not None
            else None,
        }

    def chunk_choices(
        self, delta: Delta, prompt: TokenizedPrompt, output: RequestOutput
    ) -> list[dict[str, Any]]:
        text = delta.text
        rows: list[Any] = list(delta.logprobs or [])
        tokens = list(delta.token_ids)
        texts = [row[t].decoded_token or "" for row, t in zip(rows, tokens, strict=False)]
        offset = delta.offset
        if self.echo:
            before = self._prompt_text(prompt.text, prompt.token_ids)
            if delta.first:
                text = before + text
                rows = [*(output.prompt_logprobs or []), *rows]
                tokens = [*prompt.token_ids, *tokens]
                texts = [*self._prompt_token_texts(prompt.token_ids), *texts]
            else:
                offset += len(before)
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": text,
            "logprobs": None if self.body.logprobs is None else self._logprobs(rows, tokens, texts, offset),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self.token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = prompt.token_ids if delta.first else None
        return [choice]
