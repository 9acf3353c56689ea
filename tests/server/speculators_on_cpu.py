"""Runs the released ``speculators`` where there is no accelerator: its trainer asks for one in four places.

Its client code (requests to the server, reading and deleting of files, validation) is untouched.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from speculators.train import dataloader, trainer


def current_accelerator(check_available: bool = False) -> torch.device | None:
    return None if check_available else torch.device("cpu")


trainer.get_local_rank = lambda: "cpu"
torch.accelerator.current_accelerator = current_accelerator
torch.accelerator.is_available = lambda: False


def synchronize(*args: Any) -> None:
    """There is nothing to wait for."""


torch.accelerator.synchronize = synchronize


class Loader(dataloader.DataLoader):  # type: ignore[type-arg]
    @functools.wraps(dataloader.DataLoader.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "pin_memory": False})


dataloader.DataLoader = Loader

if __name__ == "__main__":
    from speculators.__main__ import app

    sys.exit(app())
