"""A GPU's own start, beside the imports of the libraries that load a model.

A context, cuBLAS and Triton's first kernels take a GPU seconds in which the interpreter has little to do, and
importing transformers takes as long. Nothing that both would import is imported here but Triton.
"""

from __future__ import annotations

import logging
import threading

import torch

logger = logging.getLogger("layertap")


class DeviceStart:
    """Begins at once, in a thread of its own, and is done when the block that it is the context of ends,
    after an error too: a program must not end while its GPU starts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name="layertap-device-start", daemon=True)
            self._thread.start()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        """Where something failed, whoever needs it will say so."""
        if self._thread is not None:
            self._thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        from layertap.engine.fused_products import takes

        try:
            weight = torch.ones(16, 16, device=self._device, dtype=torch.bfloat16)
            torch.mm(weight, weight)
            takes(weight)
        except RuntimeError as error:
            logger.debug("the device's start failed: %s", error)
