"""Functions that a compiled graph calls as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library: Any = torch.library.Library("layertap", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(
    schema: str,
    function: Callable[..., Any],
    shape: Callable[..., Any],
    devices: Sequence[str] = ("CPU", "CUDA"),
) -> None:
    """Make a function an operator ``torch.ops.layertap.<name>``.

    Args:
        schema: its name and arguments: ``"row_scale(Tensor x, float eps) -> Tensor"``.
        shape: gives an empty result for the same arguments.
        devices: where the function runs.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in devices:
        _library.impl(name, function, device)
    torch.library.register_fake(f"layertap::{name}", shape, lib=_library)
