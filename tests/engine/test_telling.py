"""While a step runs: records that are stored are told of at once, and a step that is not full waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layertap import LLM, SamplingParams
from layertap.engine.core import EngineCore
from layertap.engine.sampler import DrawnTokens
from layertap.engine.step_clock import StepClock
from layertap.sinks.file import FileWriter


def test_a_record_is_told_of_before_the_step_that_runs_meanwhile_is_looked_at(
    make_llm: Callable[..., LLM], tiny: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    finalize, finish, commit = EngineCore._finalize, EngineCore._finish, FileWriter.commit
    steps: list[Any] = []

    def note_finalize(self: EngineCore, step: Any) -> None:
        steps.append(step)
        events.append(("looked at", len(steps)))
        finalize(self, step)

    def note_finish(self: EngineCore, request: Any) -> None:
        events.append(("told", request.prompt_token_ids[0]))
        finish(self, request)

    def slowly(self: FileWriter) -> str:
        time.sleep(0.05)
        return commit(self)

    def there(self: DrawnTokens) -> bool:
        """The first step has ended; later ones when the first record has been told of."""
        return not steps or ("told", 1) in events

    monkeypatch.setattr(EngineCore, "_may_lag", lambda self, output: True)  # as on a GPU
    monkeypatch.setattr(EngineCore, "_finalize", note_finalize)
    monkeypatch.setattr(EngineCore, "_finish", note_finish)
    monkeypatch.setattr(FileWriter, "commit", slowly)
    monkeypatch.setattr(DrawnTokens, "there", property(there))
    connector = {
        "kv_connector": "FileConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    llm = make_llm(
        tiny("llama"), layers=[1], kv_transfer_config=connector, max_num_batched_tokens=16, max_num_seqs=4
    )
    outputs = llm.generate(
        [list(range(i, i + 16)) for i in (1, 2, 3)],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
    )
    assert len(outputs) == 3
    assert events.index(("told", 1)) < events.index(("looked at", 2))


def test_a_step_that_is_not_full_waits_while_there_is_time(
    make_llm: Callable[..., LLM], tiny: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(tiny("llama"), layers=[1], max_num_batched_tokens=64, max_num_seqs=8)
    core = llm._core
    begun = core.num_steps

    def spare(self: StepClock) -> float:
        return 0.001 if core.scheduler.waiting and not core.scheduler.running else 0.0

    monkeypatch.setattr(StepClock, "seconds_to_spare", spare)  # as while a GPU computes
    outputs = llm.generate(
        [list(range(i, i + 16)) for i in (1, 2, 3, 4)],
        SamplingParams(max_tokens=1, temperature=0, detokenize=False),
    )
    assert len(outputs) == 4
    assert core.num_steps == begun + 1, "all four, which fill a step, went together"
