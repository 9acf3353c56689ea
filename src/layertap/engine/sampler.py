"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p by each request's own
generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layertap.engine.request import Request
from layertap.outputs import Logprob

LEAST_TEMPERATURE = 0.01
"""What a lower one, beside 0, counts as; so it does in vLLM. Logits divided by much less are infinite."""


def sample(logits_nV: torch.Tensor, requests: Sequence[Request], default: torch.Generator) -> torch.Tensor:
    """The next token of each request. Returns [n] int64 on the logits' device.

    Args:
        default: the engine's generator, for requests that bring no seed.
    """
    if all(r.params.greedy for r in requests):
        return logits_nV.argmax(dim=-1)
    logits = logits_nV.float()
    chosen = logits.argmax(dim=-1)
    for i, request in enumerate(requests):
        p = request.params
        if p.greedy:
            continue
        if p.seed is not None and request.generator is None:
            request.generator = torch.Generator(device=logits.device).manual_seed(p.seed % 2**63)
        row = logits[i] / max(p.temperature, LEAST_TEMPERATURE)
        if 0 < p.top_k < row.numel():
            row = row.masked_fill(row < row.topk(p.top_k).values[-1], float("-inf"))
        if p.top_p < 1.0:
            ordered, order = row.sort(descending=True)
            probabilities = ordered.softmax(-1)
            # A token stays if the ones before it do not reach top_p yet.
            drop = probabilities.cumsum(-1) - probabilities >= p.top_p
            row = row.masked_fill(torch.zeros_like(drop).scatter(0, order, drop), float("-inf"))
        generator = request.generator if request.generator is not None else default
        chosen[i] = _draw(row.softmax(-1), generator)
    return chosen


def _draw(probabilities_V: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token, as the first to come of events at these rates. Unlike ``multinomial`` it takes a row that is
    no distribution, of a model that has computed NaN: that would fail every request of the step, and on a
    GPU the process."""
    waiting_V = torch.empty_like(probabilities_V).exponential_(generator=generator)
    waiting_V.clamp_min_(torch.finfo(waiting_V.dtype).tiny)  # 0 / 0 would come first
    return (probabilities_V / waiting_V).argmax()


class DrawnTokens:
    """Tokens on their way from the device to the host.

    The copy is queued at once, so that looking at a step's tokens waits for that step alone, not for the next
    one that was launched meanwhile.

    Args:
        tokens_n: [n] int64, on any device; on a GPU, of the current stream.
    """

    def __init__(self, tokens_n: torch.Tensor) -> None:
        self._tokens_n = tokens_n
        self._copied: torch.cuda.Event | None = None
        if tokens_n.is_cuda:
            self._tokens_n = torch.empty(tokens_n.shape, dtype=tokens_n.dtype, pin_memory=True)
            self._tokens_n.copy_(tokens_n, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tokens_n.device))

    @property
    def there(self) -> bool:
        """:meth:`tolist` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def tolist(self) -> list[int]:
        """The tokens, once they are there."""
        if self._copied is not None:
            self._copied.synchronize()  # lets other threads run meanwhile
        tokens: list[int] = self._tokens_n.tolist()
        return tokens


def logprobs_of(logits_nV: torch.Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """For each row, the ``count`` most likely tokens and the given one, with log-probability and rank."""
    values = logits_nV.float().log_softmax(-1)
    index = torch.tensor(list(tokens), device=values.device)[:, None]
    own = values.gather(1, index)
    ranks = (values > own).sum(-1) + 1
    best = values.topk(min(count, values.shape[-1]), dim=-1) if count else None
    result: list[dict[int, Logprob]] = []
    for i, token in enumerate(tokens):
        row = {int(token): Logprob(float(own[i, 0]), int(ranks[i]))}
        if best is not None:
            for rank, (v, t) in enumerate(
                zip(best.values[i].tolist(), best.indices[i].tolist(), strict=True), 1
            ):
                row.setdefault(int(t), Logprob(v, rank))
        result.append(row)
    return result
