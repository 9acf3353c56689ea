"""Whether Triton's kernels can run, and where. It comes with PyTorch's CUDA builds, and needs a C compiler at
first. By itself it launches on the thread's current device and stream, wherever the arguments are."""

from __future__ import annotations

import functools
import importlib.util
import logging
from contextlib import AbstractContextManager

import torch

logger = logging.getLogger("layertap")


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Triton is installed, and has compiled a kernel here. Asked once; PyTorch's operations do the work where
    it is False."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from layertap.kernels.paged_copy import store_rows

        source = torch.arange(6.0, device=device).view(2, 3)
        target = torch.zeros(4, 3, device=device)
        store_rows(source, target, torch.tensor([3, 1], device=device))
        return bool(torch.equal(target[[3, 1]], source))
    except Exception as error:  # noqa: BLE001 - no compiler, no driver: whatever it is, there is another way
        logger.warning("Triton's kernels are not used: %s: %s", type(error).__name__, error)
        return False


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether a tensor's rows may be moved by Triton's kernels."""
    return tensor.is_cuda and has_triton(tensor.device)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Within, kernels are launched on a tensor's device."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent kernel a device runs at a time."""
    if device.type != "cuda":  # Triton's interpreter
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
