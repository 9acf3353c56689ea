"""Tokens are drawn from the distribution that the parameters describe."""

from __future__ import annotations

import pytest
import torch

from layertap.engine.request import Request
from layertap.engine.sampler import logprobs_of, sample
from layertap.outputs import RequestMetrics
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams

ONE_TOKEN = TokenizedPrompt.of(None, [1])
LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def draw(count: int, **params: object) -> list[int]:
    values = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request("r", ONE_TOKEN, values, None, frozenset(), RequestMetrics(0.0), values.max_tokens)
    generator = torch.Generator().manual_seed(0)
    return [int(sample(LOGITS[None], [request], generator)[0]) for _ in range(count)]


def test_greedy_takes_the_most_likely_token() -> None:
    assert draw(3, temperature=0.0) == [0, 0, 0]


def test_frequencies_follow_the_softmax_at_the_given_temperature() -> None:
    tokens = torch.tensor(draw(4000, temperature=0.7))
    frequencies = torch.bincount(tokens, minlength=5) / len(tokens)
    assert torch.allclose(frequencies, (LOGITS / 0.7).softmax(-1), atol=0.03)


@pytest.mark.parametrize("temperature", [5e-324, 5e-284, 1e-40, 1e-5, 1e-3])
def test_the_lowest_temperatures_take_the_most_likely_token(temperature: float) -> None:
    assert draw(20, temperature=temperature) == [0] * 20
    assert draw(20, temperature=temperature, top_k=3, top_p=0.5) == [0] * 20


def test_the_highest_temperature_draws_evenly() -> None:
    tokens = torch.tensor(draw(4000, temperature=1e6))
    assert torch.allclose(torch.bincount(tokens, minlength=5) / len(tokens), torch.full((5,), 0.2), atol=0.03)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_harm_no_other_request(broken: float) -> None:
    rows = torch.stack([LOGITS, torch.full_like(LOGITS, broken), LOGITS])
    requests = [
        Request(name, ONE_TOKEN, params, None, frozenset(), RequestMetrics(0.0), 1)
        for name, params in (
            ("a", SamplingParams(temperature=1e-3)),
            ("b", SamplingParams(temperature=1.0, top_k=2, top_p=0.9)),
            ("c", SamplingParams(temperature=0.0)),
        )
    ]
    tokens = sample(rows, requests, torch.Generator().manual_seed(0)).tolist()
    assert tokens[0] == tokens[2] == 0
    assert 0 <= tokens[1] < 5


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
