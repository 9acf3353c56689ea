"""Tokens are drawn from the distribution that the parameters describe."""

from __future__ import annotations

import torch

from layertap.engine.request import Request
from layertap.engine.sampler import logprobs_of, sample
from layertap.outputs import RequestMetrics
from layertap.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def draw(count: int, **params: object) -> list[int]:
    values = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request("r", [1], values, None, frozenset(), RequestMetrics(0.0), values.max_tokens)
    generator = torch.Generator().manual_seed(0)
    return [int(sample(LOGITS[None], [request], generator)[0]) for _ in range(count)]


def test_greedy_takes_the_most_likely_token() -> None:
    assert draw(3, temperature=0.0) == [0, 0, 0]


def test_frequencies_follow_the_softmax_at_the_given_temperature() -> None:
    tokens = torch.tensor(draw(4000, temperature=0.7))
    frequencies = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(frequencies, (LOGITS / 0.7).softmax(-1), atol=0.03)


def test_top_k_and_top_p_keep_the_smallest_set() -> None:
    assert set(draw(500, top_k=2)) == {0, 1}
    first = float(LOGITS.softmax(-1)[0])
    assert set(draw(500, top_p=first - 0.01)) == {0}
    assert set(draw(500, top_p=first + 0.01)) == {0, 1}


def test_a_seed_makes_a_request_repeatable_whatever_runs_beside_it() -> None:
    assert draw(50, seed=7) == draw(50, seed=7)
    assert draw(50, seed=7) != draw(50, seed=8)


def test_logprobs_name_the_chosen_token_its_rank_and_the_best_ones() -> None:
    (row,) = logprobs_of(LOGITS[None], [3], 2)
    assert list(row) == [3, 0, 1]
    assert row[3].rank == 4
    assert abs(row[0].logprob - float(LOGITS.log_softmax(-1)[0])) < 1e-6
