"""From the engine's requests to the outputs that users see, with ``n`` sequences of one prompt put
together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from layertap.engine.core import EngineCore
from layertap.engine.request import Request, RequestStatus
from layertap.outputs import CompletionOutput, RequestOutput
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams

OnOutput = Callable[[RequestOutput], None]

_REASONS = {
    RequestStatus.STOPPED: "stop",
    RequestStatus.LENGTH: "length",
    RequestStatus.ABORTED: "abort",
    RequestStatus.ERROR: "error",
}


class OutputCollector:
    """The ``n`` engine requests of one user request, and what they have produced so far.

    Args:
        on_output: called on the engine's thread with the whole output so far: at the end always, before it
            only with ``stream=True``, after each token.
    """

    __slots__ = ("_core", "_on_output", "_stream", "_unfinished", "prompt", "request_id", "requests")

    def __init__(
        self,
        core: EngineCore,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        on_output: OnOutput,
        stream: bool = False,
        cache_salt: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._core = core
        self._on_output = on_output
        self._stream = stream
        self._unfinished = params.n
        self.requests: list[Request] = []
        for i in range(params.n):
            own = params
            if params.n > 1:
                seed = None if params.seed is None else params.seed + i
                own = dataclasses.replace(params, n=1, seed=seed, extra_args=None)
            child_id = request_id if params.n == 1 else f"{request_id}-{i}"
            request = core.make_request(child_id, prompt, own, cache_salt)
            request.on_output = self._note
            self.requests.append(request)

    def _note(self, request: Request, finished: bool) -> None:
        if finished:
            self._unfinished -= 1
        if self._unfinished == 0 or self._stream:
            self._on_output(self.output())

    def output(self) -> RequestOutput:
        """What there is so far."""
        first = self.requests[0]
        errors = [r.error for r in self.requests if r.error is not None]
        completions = [self._completion(i, r) for i, r in enumerate(self.requests)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=first.prompt_token_ids,
            outputs=completions,
            finished=self._unfinished == 0,
            kv_transfer_params=completions[0].kv_transfer_params,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=self._named(first.prompt_logprobs) if first.prompt_logprobs else None,
            error=errors[0] if errors else None,
            metrics=first.metrics,
        )

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        done = request.status.finished and request.request_id not in self._core.requests
        reason = _REASONS.get(request.status)
        if request.error is not None:
            reason = "abort" if request.error.kind == "aborted" else "error"
        logprobs = None
        cumulative = None
        if request.params.logprobs is not None:
            named = self._named(list(request.logprobs))
            logprobs = [row for row in named if row is not None]
            chosen = zip(logprobs, request.output_token_ids, strict=False)
            cumulative = sum(row[token].logprob for row, token in chosen)
        detokenizer = self._core.detokenizer
        return CompletionOutput(
            index=index,
            text=detokenizer.finish(request) if done else request.text,
            token_ids=list(request.output_token_ids),
            finish_reason=reason if done else None,
            stop_reason=request.stop_reason,
            cumulative_logprob=cumulative,
            logprobs=logprobs,
            kv_transfer_params=request.kv_transfer_params if done and request.error is None else None,
        )

    def _named(self, rows: list) -> list:  # type: ignore[type-arg]
        """Fill in the tokens' texts."""
        tokenizer = self._core.tokenizer
        if tokenizer is not None:
            for row in rows:
                for token, entry in (row or {}).items():
                    if entry.decoded_token is None:
                        entry.decoded_token = str(tokenizer.decode([token]))
        return rows
