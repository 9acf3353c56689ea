"""The file connector: one safetensors file for each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from layertap.connectors.producing import ProducingConnector
from layertap.sinks.file import FileSink


class FileConnector(ProducingConnector):
    """Answers ``{"hidden_states_path": "<shared_storage_path>/<request_id>.safetensors"}``.

    Options beside :class:`ProducingConnector`'s:
        ``shared_storage_path``: the folder, made if missing. Default ``/tmp/hidden_states``.
        ``fsync``: flush files to the device before they get their names. Default false.
        ``use_synchronization_lock``: vLLM's; accepted and without effect, as an answer is sent only after its
            file is complete under its final name, so that a reader needs no lock.
    """

    handle_field = "hidden_states_path"
    options: ClassVar[dict[str, Any]] = {
        **ProducingConnector.options,
        "shared_storage_path": "/tmp/hidden_states",
        "fsync": False,
        "use_synchronization_lock": True,
    }

    def make_sink(self, options: Mapping[str, Any]) -> FileSink:
        return file_sink(options, self.engine_info.device.type == "cuda")


def file_sink(options: Mapping[str, Any], on_gpu: bool) -> FileSink:
    """The sink for a connector's checked options. A GPU makes more than its writer threads write by
    themselves."""
    beside = options["num_writer_threads"] if on_gpu else 0
    return FileSink(options["shared_storage_path"], options["fsync"], helpers=beside, threads=beside)
