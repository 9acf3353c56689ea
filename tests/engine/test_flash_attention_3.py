"""FlashAttention-3 is used only for what its build can do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from layertap.engine import flash_attention_3


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    flash_attention_3._operator.cache_clear()
    yield
    flash_attention_3._operator.cache_clear()


def test_sizes_of_heads_that_the_build_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference(operator: Callable[..., Any], device: torch.device, head_dim: int = 64) -> float:
        if head_dim == 96:
            raise RuntimeError("This flash attention build does not support hdim 96.")
        return 0.0

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("fa3_fwd", "fa3_fwd._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(torch.ops, "fa3_fwd", SimpleNamespace(fwd=object()), raising=False)
    monkeypatch.setattr(flash_attention_3, "_difference", difference)
    for head_dim, supported in ((64, True), (96, False), (128, True)):
        q = torch.zeros(2, 4, head_dim, dtype=torch.bfloat16)
        assert flash_attention_3.supports(q, None) is supported
        assert not flash_attention_3.supports(q, 16)
