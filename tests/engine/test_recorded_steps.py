"""Which recorded step a step is filled up to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layertap.engine.recorded_steps import RecordedSteps


def recorded(launch: float, token: float, sizes: tuple[int, ...] = (16384, 1024, 8192)) -> RecordedSteps:
    steps = RecordedSteps()
    steps.launch_seconds, steps.token_seconds = launch, token
    for size in sizes:
        graph: Any = SimpleNamespace(num_tokens=size)
        steps.add(graph)
    return steps


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(16384, 16384), (16300, 16384), (16385, None), (12000, None), (8193, None), (8100, 8192),
     (8000, 8192), (1025, 8192), (1024, 1024), (3, 1024)],
)  # fmt: skip
def test_a_small_model_is_launched_only_where_padding_costs_more(
    num_tokens: int, expected: int | None
) -> None:
    """30 ms to launch; 2 us a token: 16,384 tokens take 33 ms, 8,192 take 16."""
    graph = recorded(0.030, 2e-6).pick(num_tokens)
    assert (graph.num_tokens if graph else None) == expected


@pytest.mark.parametrize(("num_tokens", "expected"), [(16384, 16384), (8000, None), (900, 1024), (100, 1024)])
def test_padding_of_a_large_model_is_dear(num_tokens: int, expected: int | None) -> None:
    """35 ms to launch; 24 us a token."""
    graph = recorded(0.035, 24e-6).pick(num_tokens)
    assert (graph.num_tokens if graph else None) == expected


def test_nothing_recorded_or_measured() -> None:
    assert RecordedSteps().pick(5) is None
    steps = recorded(0.0, 0.0, (128,))
    assert steps.pick(127) is not None
    assert steps.pick(100) is None
    assert list(steps.smaller_sizes(128)) == []


def test_sizes_that_are_worth_recording() -> None:
    assert list(recorded(0.030, 2e-6, ()).smaller_sizes(16384)) == [12288, 8192, 4096, 1024]
    assert list(recorded(0.035, 24e-6, ()).smaller_sizes(16384)) == [1024]
    assert list(recorded(0.030, 2e-6, ()).smaller_sizes(128)) == [64]
    assert list(recorded(0.030, 2e-6, ()).smaller_sizes(40)) == []
