"""What a step's tokens mean for its requests: text, log-probabilities, and whether a request has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from layertap.engine.detokenizer import Detokenizer
from layertap.engine.request import Request, RequestStatus
from layertap.engine.runner import StepLogits
from layertap.engine.sampler import DrawnTokens, logprobs_of
from layertap.engine.scheduler import ScheduledRequest


class Postprocessor:
    """Takes tokens into their requests.

    Args:
        max_model_len: the longest sequence, prompt and output together.
        eos_token_ids: tokens that end a text of this model; ending with one is no ``stop_reason``.
    """

    def __init__(self, detokenizer: Detokenizer, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        self.detokenizer = detokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len

    def take(
        self, scheduled: Sequence[ScheduledRequest], logits: StepLogits, tokens: DrawnTokens | None
    ) -> Iterator[Request]:
        """Take a step's results; on a GPU this waits for the step.

        Args:
            tokens: one for each of ``logits.sampling``; None if there are none.

        Yields:
            Each request that has ended with this step, before the next one is looked at: what happens at its
            end may abort others.
        """
        now = time.monotonic()
        for s, rows in logits.prompt:
            _note_prompt_logprobs(s, rows)
        ids = tokens.tolist() if tokens is not None else []
        drawn = {id(s.request): (i, t) for i, (s, t) in enumerate(zip(logits.sampling, ids, strict=False))}
        for s in scheduled:
            request = s.request
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted since
            if s.samples and id(request) in drawn:
                row, token = drawn[id(request)]
                if request.metrics.first_token is None:
                    request.metrics.first_token = now
                request.output_token_ids.append(token)
                if request.params.logprobs is not None:
                    assert logits.rows is not None
                    row_1V = logits.rows[row][None]
                    request.logprobs.extend(logprobs_of(row_1V, [token], request.params.logprobs))
                self._check_stop(request, token)
                if request.on_output is not None and not request.status.finished:
                    request.on_output(request, False)
            elif request.max_tokens == 0 and s.start + s.num_tokens == request.num_tokens:
                request.status = RequestStatus.LENGTH  # nothing is to be generated
            if request.status.finished:
                yield request

    def _check_stop(self, request: Request, token: int) -> None:
        params = request.params
        self.detokenizer.append(request)
        count = len(request.output_token_ids)
        if count >= params.min_tokens:
            if token in request.eos_token_ids:
                request.status = RequestStatus.STOPPED
                request.stop_reason = None if token in self.eos_token_ids else token
            else:
                stop = self.detokenizer.find_stop(request)
                if stop is not None:
                    request.status = RequestStatus.STOPPED
                    request.stop_reason = stop
        if not request.status.finished and (
            count >= params.max_tokens or request.num_tokens >= self.max_model_len
        ):
            request.status = RequestStatus.LENGTH


def _note_prompt_logprobs(s: ScheduledRequest, logits_nV: torch.Tensor) -> None:
    """Row i of the logits predicts prompt token ``s.start + i + 1``."""
    request = s.request
    count = request.params.prompt_logprobs
    assert count is not None
    if s.start == 0:
        request.prompt_logprobs = [None]
    predicted = request.prompt_token_ids[s.start + 1 : s.start + s.num_tokens + 1]
    if predicted:
        request.prompt_logprobs.extend(logprobs_of(logits_nV[: len(predicted)], predicted, count))
