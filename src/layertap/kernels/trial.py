"""Whether kernels give what PyTorch gives, on the machine that they are to be used on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

logger = logging.getLogger("layertap")

_TOLERANCE = 2e-2


def agree(what: str, pairs: Callable[[], Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> bool:
    """Run kernels once beside PyTorch. Where they fail or differ, that is logged.

    Args:
        what: is not used then, for the log.
        pairs: computes what the kernels give and what PyTorch gives.
    """
    try:
        errors = [
            float((got.float() - expected.float()).norm() / expected.float().norm())
            for got, expected in pairs()
        ]
    except Exception as error:  # noqa: BLE001 - another release of Triton, say: there is another way
        logger.warning("%s are not used: %s: %s", what, type(error).__name__, error)
        return False
    if not all(error < _TOLERANCE for error in errors):
        logger.warning("%s are not used: they differ from PyTorch's by %s", what, errors)
        return False
    return True
