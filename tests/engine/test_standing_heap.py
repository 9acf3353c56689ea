"""The collector leaves alone what was there before a long call, and gets it back afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from layertap.engine.standing_heap import standing_heap


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
    with standing_heap():
        del node
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


def test_what_is_made_inside_is_collected_inside() -> None:
    with standing_heap():
        gone = weakref.ref(Node())
        gc.collect()
        assert gone() is None


def test_the_heap_stays_frozen_until_the_last_call_has_left() -> None:
    first, second = standing_heap(), standing_heap()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count() > 0
    second.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0


def test_a_failure_leaves_too() -> None:
    with pytest.raises(KeyError), standing_heap():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_a_heap_that_the_process_has_frozen_itself_stays_frozen() -> None:
    gc.freeze()
    with standing_heap():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0
