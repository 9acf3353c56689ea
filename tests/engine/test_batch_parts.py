"""Which sequences of a step find their keys in the cache, and which tokens are stored there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from layertap.engine.attention import Part, parts_of
from layertap.engine.runner import _stored


def parts(contexts: list[int], counts: list[int]) -> list[Part]:
    starts = [0, *np.cumsum(counts).tolist()]
    totals = [c + n for c, n in zip(contexts, counts, strict=True)]
    slots = torch.arange(sum(totals))
    return parts_of(starts, contexts, totals, lambda n: slots[:n], torch.from_numpy)


def described(found: list[Part]) -> list[tuple[Any, ...]]:
    return [
        (
            part.start,
            part.end,
            part.cu_seqlens_q.tolist(),
            part.cu_seqlens_k.tolist(),
            part.max_seqlen_q,
            part.max_seqlen_k,
            None if part.slots is None else len(part.slots),
        )
        for part in found
    ]


def test_without_a_context_all_keys_are_the_steps_own() -> None:
    assert described(parts([0, 0], [5, 3])) == [(0, 8, [0, 5, 8], [0, 5, 8], 5, 5, None)]


def test_sequences_begun_earlier_come_first_and_alone_read_the_cache() -> None:
    assert described(parts([7, 2, 0, 0], [1, 4, 6, 2])) == [
        (0, 5, [0, 1, 5], [0, 8, 14], 4, 8, 14),
        (5, 13, [0, 6, 8], [0, 6, 8], 6, 6, None),
    ]


def test_contexts_elsewhere_put_the_whole_step_through_the_cache() -> None:
    assert described(parts([0, 4], [5, 3])) == [(0, 8, [0, 5, 8], [0, 5, 12], 5, 7, 12)]


def step(*requests: tuple[int, int, int]) -> Any:
    """Of (tokens before, tokens in the step, tokens of the prompt), for one token to be generated."""
    return [
        SimpleNamespace(
            start=start,
            num_tokens=count,
            samples=start + count == length,
            request=SimpleNamespace(num_tokens=length, output_token_ids=[], max_tokens=1),
        )
        for start, count, length in requests
    ]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([(0, 5, 5), (0, 3, 3)], []),
        ([(0, 5, 5), (0, 3, 9)], [(5, 8)]),
        ([(4, 2, 6), (0, 5, 5), (0, 3, 9)], [(0, 2), (7, 10)]),
        ([(4, 2, 6), (2, 3, 5), (0, 5, 5)], [(0, 5)]),
        ([(0, 2, 3), (0, 2, 2), (0, 2, 3), (0, 2, 2), (0, 2, 3), (0, 2, 2), (0, 2, 3)], None),
    ],
)
def test_only_what_is_read_again_is_stored(
    requests: list[tuple[int, int, int]], expected: list[tuple[int, int]] | None
) -> None:
    starts = [0, *np.cumsum([count for _, count, _ in requests]).tolist()]
    assert _stored(step(*requests), starts, [start for start, _, _ in requests]) == expected
