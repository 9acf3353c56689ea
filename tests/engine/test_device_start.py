"""A GPU's start runs beside what the block does, and is over when the block is left."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from layertap.engine.device_start import DeviceStart


def running() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "layertap-device-start"]


def test_a_cpu_needs_no_start() -> None:
    with DeviceStart(torch.device("cpu")):
        assert running() == []


def test_it_is_over_after_the_block_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def start(self: DeviceStart) -> None:
        time.sleep(0.1)
        order.append("started")

    monkeypatch.setattr(DeviceStart, "_run", start)

    def fail() -> None:
        with DeviceStart(torch.device("cuda")):
            order.append("beside")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert order == ["beside", "started"]
    assert running() == []
