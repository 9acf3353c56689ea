"""The clock that says how long the next launch can wait."""

from __future__ import annotations

import pytest

from layertap.engine.step_clock import StepClock


class Device:
    """A device of one second a token, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free = 0.0
        self.clock = StepClock(lambda: self.now)

    def launch(self, tokens: int, seconds: float = 0.001) -> None:
        begun = self.now
        end = max(self.free, begun) + tokens
        self.free = end
        self.now += seconds
        self.clock.launched(tokens, begun, lambda: self.now >= end)

    def watch(self, until: float) -> None:
        """Look every two milliseconds."""
        while self.now < until:
            self.now += 0.002
            self.clock.look()


def test_nothing_is_known_before_a_step_was_seen_to_end() -> None:
    device = Device()
    assert device.clock.seconds_to_spare() == 0
    device.launch(2)
    assert device.clock.seconds_to_spare() == 0
    device.watch(102.1)
    assert device.clock.seconds_to_spare() == 0, "nothing runs"
    device.launch(3)
    assert device.clock.seconds_to_spare() == pytest.approx(3, abs=0.02)
    device.now += 1
    assert device.clock.seconds_to_spare() == pytest.approx(2, abs=0.02)
    device.now += 5
    assert device.clock.seconds_to_spare() == 0


def test_a_step_behind_another_begins_when_that_ends() -> None:
    device = Device()
    device.launch(2)
    device.launch(4)
    device.watch(102.5)
    assert device.clock.seconds_to_spare() == pytest.approx(3.5, abs=0.02)
    device.launch(1)
    assert device.clock.seconds_to_spare() == pytest.approx(4.5, abs=0.02)


def test_slow_launches_leave_more_time() -> None:
    device = Device()
    device.launch(2)
    device.watch(102.1)
    device.launch(3, seconds=0.5)
    assert device.clock.seconds_to_spare() == pytest.approx(1.5, abs=0.02)


def test_an_end_that_was_not_watched_says_nothing_of_the_speed() -> None:
    device = Device()
    device.launch(2)
    device.launch(2)
    device.now = 150
    device.clock.look()
    device.launch(5)
    assert device.clock.seconds_to_spare() == 0
    device.now = device.free
    device.clock.look(waited=True)
    device.launch(5)
    assert device.clock.seconds_to_spare() == pytest.approx(5, abs=0.02)


def test_the_fastest_of_the_latest_steps_counts() -> None:
    device = Device()
    device.launch(4)
    device.watch(104.1)
    begun = device.now
    device.clock.launched(1, begun, lambda: device.now >= begun + 3)  # three seconds for a token
    device.watch(begun + 3.1)
    device.launch(4)
    assert device.clock.seconds_to_spare() == pytest.approx(4, abs=0.02)


def test_a_step_whose_beginning_was_not_seen_does_not_begin_later_with_every_look() -> None:
    device = Device()
    device.launch(1)
    device.watch(101.1)
    device.launch(2)
    device.launch(3)
    device.now = device.free - 2.5
    device.clock.look()
    spare = device.clock.seconds_to_spare()
    device.watch(device.now + 0.5)
    assert device.clock.seconds_to_spare() == pytest.approx(max(0.0, spare - 0.5), abs=0.02)
