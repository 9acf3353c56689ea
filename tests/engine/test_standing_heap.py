"""The collector leaves alone what was there before a long call, and gets it back afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from layertap.engine.standing_heap import MANY, collections_put_off, standing_heap


class Node:
    def __init__(self) -> None:
        self.own = self  # only the collector can free it


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_became_garbage_meanwhile_is_collected_afterwards() -> None:
    node = Node()
    gone = weakref.ref(node)
    with standing_heap() as note:
        note(MANY)
        del node
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_is_made_inside_is_collected_inside() -> None:
    with standing_heap() as note:
        note(MANY)
        gone = weakref.ref(Node())
        gc.collect()
        assert gone() is None


def test_the_heap_stays_frozen_until_the_last_call_has_left() -> None:
    first, second = standing_heap(), standing_heap()
    for note in (first.__enter__(), second.__enter__()):
        note(MANY)
        note(MANY + 1)
    first.__exit__(None, None, None)
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0


def test_a_failure_leaves_too() -> None:
    def fail() -> None:
        with standing_heap() as note:
            note(MANY)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_freeze_count() == 0


def test_a_heap_that_the_process_has_frozen_itself_stays_frozen() -> None:
    gc.freeze()
    with standing_heap() as note:
        note(MANY)
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0


def dead_nodes() -> int:
    return sum(type(o) is Node for o in gc.get_objects())


@pytest.mark.parametrize("num_prompts", [8, MANY])
def test_a_program_of_many_calls_does_not_keep_its_garbage(
    num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layertap.engine.standing_heap._SECONDS", 0.0)
    gc.collect()
    for _ in range(12):  # few, as a collection goes through whatever the tests before have made
        for _ in range(1000):
            Node()  # as a training step leaves them
        with standing_heap() as note:
            note(num_prompts)
    assert dead_nodes() < 3000


def test_a_short_call_that_is_never_ended_freezes_nothing() -> None:
    with standing_heap() as note:
        for count in range(MANY):
            note(count)
        assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_collections_are_put_off_for_a_moment_and_then_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), collections_put_off():
            _fail_inside_another()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def _fail_inside_another() -> None:
    with collections_put_off():
        assert not gc.isenabled()
    assert not gc.isenabled()  # the outer one lasts
    raise KeyError
