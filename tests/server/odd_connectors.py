"""Connectors that go wrong: at the start, or with a request of a certain dtype."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from layertap.connectors.base import Outcome
from layertap.connectors.file import FileConnector


class NoMemoryConnector(FileConnector):
    """Fails at the start, as a GPU that is too small does."""

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation.")


class Unreadable:
    """Can be pickled; the reader fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _fail, ()


def _fail() -> None:
    raise RuntimeError("unreadable")


class OddConnector(FileConnector):
    """``float32``: refuses with an unforeseen error. ``float16``, ``bfloat16``: answers with what cannot be
    pickled, or cannot be read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._odd: dict[str, type] = {}

    def check_request(self, params: Mapping[str, Any] | None, request_id: str | None = None) -> None:
        super().check_request(params, request_id)
        dtype = (params or {}).get("dtype")
        if dtype == "float32":
            raise TypeError("boom")
        odd = {"float16": threading.Lock, "bfloat16": Unreadable}.get(dtype or "")
        if odd is not None and request_id is not None:
            self._odd[request_id] = odd

    def take_completed(self) -> dict[str, Outcome]:
        completed = super().take_completed()
        for name, outcome in completed.items():
            if name in self._odd and isinstance(outcome, dict):
                outcome["odd"] = self._odd[name]()
        return completed
