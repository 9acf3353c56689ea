"""A measured process answers, fails or is stopped, and takes what it started with it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from layertap.bench.peers import missing_modules
from layertap.bench.process import JsonProcess, OutOfTimeError, PeerFailedError

_ECHO = """
import json, subprocess, sys, time
print("it begins", file=sys.stderr, flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for line in sys.stdin:
    question = json.loads(line)
    time.sleep(question.get("sleep", 0))
    if "die" in question:
        raise ValueError(question["die"])
    print(json.dumps({"child": child.pid, **question}), flush=True)
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[JsonProcess]:
    made = JsonProcess("echo", [sys.executable, "-c", _ECHO], tmp_path / "echo.log", os.environ)
    yield made
    made.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_answers_line_by_line_and_its_children_end_with_it(process: JsonProcess) -> None:
    process.ask(value=1)
    first = process.answer()
    assert first["value"] == 1
    process.ask(value=2)
    assert process.answer()["value"] == 2
    assert _runs(first["child"])
    process.close()
    assert not _runs(first["child"])


def test_one_that_is_late_is_stopped_at_once(process: JsonProcess) -> None:
    process.ask(value=1)
    child = process.answer()["child"]
    waits: list[float] = []
    process.ask(sleep=600)
    with pytest.raises(OutOfTimeError, match="echo was stopped after"):
        process.answer(time.monotonic() + 0.7, every=0.2, waiting=waits.append)
    assert 1 <= len(waits) <= 3  # a busy machine may tell fewer
    assert all(seconds >= 0.2 * (i + 1) for i, seconds in enumerate(waits))
    begun = time.monotonic()
    process.close()
    assert time.monotonic() - begun < 10
    assert not _runs(child)


def test_one_that_dies_is_told_with_what_it_said(process: JsonProcess) -> None:
    process.ask(die="no room")
    with pytest.raises(PeerFailedError, match="no room"):
        process.answer()
    assert process.causes() == ["ValueError: no room"]
    assert process.log.read_text().startswith("it begins")


def test_modules_that_a_python_cannot_import_are_named() -> None:
    assert missing_modules(sys.executable, ["json", "no_such_module"]) == ["no_such_module"]
    assert missing_modules("/no/such/python", ["json"]) == ["json"]
