"""schemathesis makes requests up from our OpenAPI document; none of them may end in a 5xx."""

from __future__ import annotations

import hypothesis
import pytest

from .conftest import ThreadServer

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def schema(server: ThreadServer):  # type: ignore[no-untyped-def]
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


lazy = schemathesis.pytest.from_fixture("schema")


@lazy.parametrize()
@hypothesis.settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
def test_nothing_that_the_document_allows_or_forbids_ends_in_a_5xx(case) -> None:  # type: ignore[no-untyped-def]
    response = case.call(timeout=60)
    assert response.status_code < 500, response.text
