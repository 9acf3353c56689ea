import threading

import pytest

from layertap.connectors.staging import RingClosedError, StagingRing


def test_buffers_are_made_when_needed_and_reused():
    ring = StagingRing(3, 64)
    assert ring.allocated_bytes == 0
    first = ring.acquire()
    ring.release(first)
    assert ring.acquire() is first
    assert (ring.allocated_bytes, ring.in_use, ring.high_water) == (64, 1, 1)


def test_acquire_waits_for_a_release():
    ring = StagingRing(1, 64)
    buffer = ring.acquire()
    assert ring.try_acquire() is None
    threading.Timer(0.02, ring.release, [buffer]).start()
    assert ring.acquire() is buffer
    assert ring.wait_seconds > 0


@pytest.mark.parametrize("how", ["close", "give up"])
def test_a_waiter_is_let_go(how):
    ring = StagingRing(1, 64)
    held = ring.acquire()
    given_up = threading.Event()
    outcome = []

    def wait():
        try:
            outcome.append(ring.acquire(given_up.is_set))
        except RingClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    if how == "close":
        ring.close()
    else:
        given_up.set()
        ring.wake()
    thread.join(5)
    assert isinstance(outcome[0], RingClosedError)
    ring.release(held)
    ring.close()
    assert (ring.in_use, ring.allocated_bytes) == (0, 0)
