"""The memory connector: records stay in this process until they are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layertap.connectors.producing import GPU_DEFAULTS, ProducingConnector
from layertap.sinks.memory import MemorySink

_THREADS = 4  # that copy a record of a GPU's


class MemoryConnector(ProducingConnector):
    """Answers ``{"hidden_states_handle": "memory://<request_id>"}``, to be read with
    :func:`layertap.reader.open` in the same process. Records that nobody takes stay; ``memory_bytes`` in the
    statistics is their size."""

    handle_field = "hidden_states_handle"
    # Each writer that wants the interpreter takes it from whoever launches steps, so they are few with large
    # buffers; others outside the interpreter do the copying.
    gpu_options: ClassVar[dict[str, Any]] = GPU_DEFAULTS | {
        "num_writer_threads": 4,
        "staging_chunk_bytes": 64 << 20,
    }
    sink: MemorySink

    def make_sink(self, options: Mapping[str, Any]) -> MemorySink:
        # A GPU makes more than a few writer threads copy by themselves.
        return MemorySink(threads=_THREADS if self.engine_info.device.type == "cuda" else 1)

    def stats(self) -> dict[str, float]:
        return {**super().stats(), "memory_bytes": self.sink.bytes}
