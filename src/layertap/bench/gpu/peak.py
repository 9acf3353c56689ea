"""What the machine can do at most, measured in a process of its own in the same run as the ways.

    python -m layertap.bench.gpu.peak [SIZE]

Prints one line of JSON: the machine, the device, the rate of a SIZE x SIZE x SIZE bfloat16 matrix product
(the roofline that MFU is counted against) and the rate of copies from the device to page-locked memory. On a
CPU it is the faster of bfloat16 and float32, in the best of a few rounds: one without half-precision units is
many times faster in float32.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SIZE = 8192
_MOST_ON_A_CPU = 256
_COPY_BYTES = 1 << 30
_ROUNDS = 20
_TRIES = 5


def measure_peak(size: int) -> dict[str, Any]:
    """Rates of this machine's device, a CPU where there is no GPU.

    Args:
        size: of the square matrices; on a CPU small ones are taken.

    Returns:
        ``device``, ``matmul_flops_per_second``, ``copy_bytes_per_second`` (None on a CPU) and ``machine``.
    """
    import torch

    from layertap.bench.machine import describe_machine

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    def rate(work: Callable[[], object], rounds: int) -> float:
        """Times a second that the work is done."""
        for _ in range(3):
            work()
        _wait(on_gpu)
        start = time.perf_counter()
        for _ in range(rounds):
            work()
        _wait(on_gpu)
        return rounds / (time.perf_counter() - start)

    if not on_gpu:
        size = min(size, _MOST_ON_A_CPU)

    def products(dtype: torch.dtype) -> float:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        return rate(lambda: a @ b, _ROUNDS)

    if on_gpu:
        fastest = products(torch.bfloat16)
    else:
        fastest = max(products(dtype) for dtype in (torch.bfloat16, torch.float32) for _ in range(_TRIES))
    result: dict[str, Any] = {
        "device": device.type,
        "matmul_size": size,
        "matmul_flops_per_second": 2.0 * size**3 * fastest,
        "copy_bytes_per_second": None,
        "machine": describe_machine(),
    }
    if on_gpu:
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        copies = rate(lambda: target.copy_(source, non_blocking=True), 8)
        result["copy_bytes_per_second"] = _COPY_BYTES * copies
    return result


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        import torch

        torch.cuda.synchronize()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries may print to standard output
    os.dup2(2, 1)
    print(json.dumps(measure_peak(int(sys.argv[1]) if len(sys.argv) > 1 else SIZE)), file=answers, flush=True)


if __name__ == "__main__":
    main()
