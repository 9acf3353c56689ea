"""The connector that hands ended requests to a :class:`Producer`; file and memory differ in the sink and the
handle."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from layertap.config import check_names
from layertap.connectors.base import FinishedRequest, KVConnectorBase, Outcome, Params
from layertap.connectors.job import Job
from layertap.connectors.producer import DEFAULT_CHUNK_BYTES, DEFAULT_RING_BYTES, Producer
from layertap.connectors.transfer_config import EngineInfo, KVTransferConfig
from layertap.errors import InvalidInputError
from layertap.selection import Selection
from layertap.sinks.base import Sink

GPU_DEFAULTS: dict[str, Any] = {
    # One thread writes 1 to 2 GB/s, a GPU makes more; two buffers for each, of which one is filled while the
    # other is written.
    "num_writer_threads": 8,
    "staging_chunk_bytes": DEFAULT_CHUNK_BYTES // 2,
    "staging_ring_bytes": 2 * DEFAULT_RING_BYTES,
}

_EXTRA = "kv_transfer_config.kv_connector_extra_config"


class ProducingConnector(KVConnectorBase):
    """Options that every such connector knows: ``num_writer_threads``, ``staging_chunk_bytes``,
    ``staging_ring_bytes``."""

    handle_field: ClassVar[str]
    """Where the handle goes in ``kv_transfer_params``."""
    options: ClassVar[dict[str, Any]] = {
        "num_writer_threads": 2,
        "staging_chunk_bytes": DEFAULT_CHUNK_BYTES,
        "staging_ring_bytes": DEFAULT_RING_BYTES,
    }
    """Known keys of ``kv_connector_extra_config`` with their defaults."""
    gpu_options: ClassVar[dict[str, Any]] = GPU_DEFAULTS
    """Those that are others on a GPU."""

    def __init__(self, kv_transfer_config: KVTransferConfig, engine_info: EngineInfo) -> None:
        super().__init__(kv_transfer_config, engine_info)
        on_gpu = engine_info.device.type == "cuda"
        self._options = check_options(
            kv_transfer_config.kv_connector_extra_config, self.options | (self.gpu_options if on_gpu else {})
        )
        self.sink = self.make_sink(self._options)
        self._producer: Producer | None = None
        self._completed: dict[str, Outcome] = {}
        self._sent: set[str] = set()
        self._ended: list[Job] = []
        """Requests that ended in this step: handed on together, so that they are gathered together."""

    @abstractmethod
    def make_sink(self, options: Mapping[str, Any]) -> Sink:
        """The sink for checked options."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        info = self.engine_info
        if len(kv_caches) != 1:
            raise ValueError(f"expected the one hidden-state cache, got {sorted(kv_caches)}")
        (cache,) = kv_caches.values()
        expected = (info.num_blocks, info.block_size, len(info.layers.columns), info.hidden_size)
        if tuple(cache.shape) != expected or cache.dtype != info.dtype:
            raise ValueError(
                f"the hidden-state cache is {cache.dtype} {tuple(cache.shape)}, not {info.dtype} {expected}"
            )
        self._producer = Producer(
            cache,
            self.sink,
            model=info.model,
            layers=info.layers,
            chunk_bytes=self._options["staging_chunk_bytes"],
            ring_bytes=self._options["staging_ring_bytes"],
            num_writers=self._options["num_writer_threads"],
        )

    @property
    def producer(self) -> Producer:
        assert self._producer is not None, "register_kv_caches comes first"
        return self._producer

    def request_finished(self, request: FinishedRequest, block_ids: list[int]) -> tuple[bool, Params | None]:
        """Keep a request until the step's last has ended. One that keeps nothing, or ended before its prompt
        was computed, is let go at once."""
        selection = request.selection
        num_prompt_tokens = len(request.prompt_token_ids)
        if selection is None or request.num_computed_tokens < num_prompt_tokens:
            return False, None
        length = num_prompt_tokens
        if selection.include_output_tokens:
            length += len(request.output_token_ids)
        token_ids = request.token_array(0, length)
        handle = self.sink.handle(request.request_id)
        num_tokens = min(request.num_computed_tokens, length)
        ready = getattr(request, "states_ready", None)
        self._ended.append(
            Job(request.request_id, token_ids, num_tokens, num_prompt_tokens, block_ids, selection, ready)
        )
        return True, {self.handle_field: handle}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._take_news()
        sent, self._sent = self._sent, set()
        return sent or None, None

    def take_completed(self) -> dict[str, Outcome]:
        self._take_news()
        completed, self._completed = self._completed, {}
        return completed

    def _hand_on(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self.producer.submit(*ended)

    def _take_news(self) -> None:
        self._hand_on()
        for news in self.producer.poll():
            if news.kind == "copied":
                self._sent.add(news.request_id)
            else:
                self._completed[news.request_id] = news.error or {self.handle_field: news.handle}

    def check_request(self, params: Mapping[str, Any] | None, request_id: str | None = None) -> None:
        selection = Selection.parse(params, self.engine_info.layers)
        if self._producer is not None:
            self._producer.check(selection.columns)
        if request_id is not None:
            self.sink.handle(request_id)

    def cancel(self, request_id: str) -> bool:
        self._hand_on()
        return self.producer.cancel(request_id)

    def wait(self, timeout: float) -> None:
        self._hand_on()
        if not self._sent and not self._completed:
            self.producer.wait(timeout)

    def close(self, drain: bool = True) -> None:
        if self._producer is not None:
            self._hand_on()
            self._producer.close(drain)
        self.sink.close()

    def stats(self) -> dict[str, float]:
        return self.producer.stats() if self._producer is not None else {}


def check_options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Options with their defaults filled in; each has the type of its default.

    Raises:
        InvalidInputError: an unknown key (the nearest known one is named) or a value of the wrong type.
    """
    check_names(given, defaults, f"{_EXTRA}.")
    options = {**defaults, **given}
    checks: dict[type, tuple[Callable[[Any], bool], str]] = {
        bool: (lambda v: isinstance(v, bool), "true or false"),
        int: (lambda v: isinstance(v, int) and not isinstance(v, bool) and v > 0, "an integer from 1 up"),
        str: (lambda v: isinstance(v, str) and bool(v), "a path"),
    }
    for key, default in defaults.items():
        holds, allowed = checks[type(default)]
        if not holds(options[key]):
            raise InvalidInputError(f"{_EXTRA}.{key}", options[key], allowed)
    return options
