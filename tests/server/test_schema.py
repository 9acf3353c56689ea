"""schemathesis makes requests up from our OpenAPI document; none of them may end in a 5xx."""

from __future__ import annotations

import collections
from typing import Any

import hypothesis
import pytest

from layertap.server.sampling import _NEUTRAL

from .conftest import ThreadServer

schemathesis = pytest.importorskip("schemathesis")


@pytest.mark.slow
def test_nothing_that_the_document_allows_or_forbids_ends_in_a_5xx(server: ThreadServer) -> None:
    # The library's own pytest plugin does not know pytest 9, so its strategies are driven here.
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    seen: collections.Counter[int] = collections.Counter()
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            try:
                for tame in (False, True):
                    _drive(operation.as_strategy(generation_mode=mode), seen, tame)
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing wrong can be made up for an operation without parameters
    assert seen[200] > 40, seen
    assert seen[400] > 50, seen
    assert not [status for status in seen if status >= 500]


def _tame(body: Any) -> None:
    """Take the most frequent reasons for an early refusal away, so that what lies behind is reached."""
    if not isinstance(body, dict):
        return
    for name in (*_NEUTRAL, "model", "request_id", "top_logprobs", "prompt_logprobs", "min_tokens"):
        body.pop(name, None)
    for name in ("prompt", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [5 + t % 300 if type(t) is int else t for t in body[name]]
    if type(body.get("max_tokens")) is int:
        body["max_tokens"] %= 9
    if isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": "x"}, *body["messages"]][:1]


def _drive(strategy: Any, seen: collections.Counter[int], tame: bool) -> None:
    @hypothesis.settings(
        max_examples=15,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(case=strategy)
    def check(case: Any) -> None:
        if tame:
            _tame(case.body)
        response = case.call(timeout=60)
        seen[response.status_code] += 1
        assert response.status_code < 500, (case.as_curl_command(), response.text)

    check()
