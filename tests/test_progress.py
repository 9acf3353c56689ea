"""Progress where there is no terminal: a line now and then."""

from __future__ import annotations

import pytest

from layertap import progress
from layertap.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_is_written_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1000, shown=False, every=30.0) as shown:
        for _ in range(10):
            clock[0] += 10
            shown.advance(500, 1 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "layertap: 3 of 1,000 prompts, 50 tokens/s, 3.0 MiB, about 166 min left",
        "layertap: 6 of 1,000 prompts, 50 tokens/s, 6.0 MiB, about 166 min left",
        "layertap: 9 of 1,000 prompts, 50 tokens/s, 9.0 MiB, about 165 min left",
    ]


def test_a_long_silence_is_one_line(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(None, shown=False, every=30.0) as shown:
        clock[0] += 200
        shown.advance(400)
        clock[0] += 5
        shown.advance(420)
        clock[0] += 6
        shown.advance(4)
    assert capsys.readouterr().err.splitlines() == [
        "layertap: 1 prompts, 2 tokens/s",
        "layertap: 3 prompts, 4 tokens/s",
    ]


def test_nothing_is_written_unasked(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, shown=False) as shown:
        clock[0] += 1000
        shown.advance(1)
    assert capsys.readouterr().err == ""
