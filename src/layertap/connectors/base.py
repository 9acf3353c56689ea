"""The KV connector API, the producing half: vLLM's v1 names, and a few of ours that a minimal connector need
not write."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from layertap.connectors.transfer_config import EngineInfo, KVTransferConfig
from layertap.errors import ExtractionError
from layertap.selection import Selection
from layertap.token_ids import TokenArray

Params = dict[str, Any]
Outcome = Params | ExtractionError


class FinishedRequest(Protocol):
    """What a connector reads of a request that has ended."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    def token_array(self, start: int, end: int) -> TokenArray:
        """Ids of the prompt's tokens and then the output's, from ``start`` to before ``end``."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose states lie in the cache."""

    @property
    def selection(self) -> Selection | None: ...


class KVConnectorBase(ABC):
    """Carries hidden states out of the paged cache.

    The engine's thread alone calls it, in this order: ``register_kv_caches`` once; for each request
    ``check_request`` at admission and ``request_finished`` (or, for an aborted one, ``cancel``); after every
    step ``get_finished`` and ``take_completed``; ``close`` at the end.

    A subclass must write ``register_kv_caches``, ``request_finished`` and ``get_finished``. One that does not
    write ``take_completed`` is taken to have delivered a request as soon as it lets go of its blocks (see
    :mod:`layertap.connectors.completing`).
    """

    def __init__(self, kv_transfer_config: KVTransferConfig, engine_info: EngineInfo) -> None:
        self.kv_transfer_config = kv_transfer_config
        self.engine_info = engine_info

    @abstractmethod
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Hand over the hidden-state cache: one entry, layer name -> [num_blocks, block_size, C, H], any
        strides."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Once a step, after scheduling. What it returns is the connector's own affair."""
        return None

    @abstractmethod
    def request_finished(self, request: FinishedRequest, block_ids: list[int]) -> tuple[bool, Params | None]:
        """A request has computed its last token; its states will be valid once the work queued on the device
        so far is done; on a GPU earlier, once the event ``request.states_ready`` has come.

        Returns:
            ``delay_free``: True keeps the blocks allocated until :meth:`get_finished` reports the request.
            ``kv_transfer_params``: what the client is told.
        """

    @abstractmethod
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed now (also after a failure), and requests received (none here).
        Never blocks.

        Args:
            finished_req_ids: requests that ended since the last call.
        """

    def take_completed(self) -> dict[str, Outcome]:
        """Requests that are delivered, or failed, since the last call: their final ``kv_transfer_params`` or
        the error."""
        return {}

    def check_request(self, params: Mapping[str, Any] | None, request_id: str | None = None) -> None:  # noqa: B027
        """Refuse at admission what would fail later.

        Args:
            params: the request's ``kv_transfer_params``.
            request_id: the id that it will have.

        Raises:
            InvalidInputError: naming the field, the value and what is allowed.
        """

    def cancel(self, request_id: str) -> bool:
        """Stop delivering a request. True if nothing of it will be published; its blocks are still reported
        by :meth:`get_finished` if they were delayed. False if it is unknown or already delivered."""
        return False

    def wait(self, timeout: float) -> None:
        """Block until :meth:`get_finished` or :meth:`take_completed` may have news, at most ``timeout``
        seconds."""
        time.sleep(min(timeout, 0.001))

    def close(self, drain: bool = True) -> None:  # noqa: B027
        """Deliver what was handed in (or abort it, with ``drain=False``) and release threads, memory and
        descriptors."""

    def stats(self) -> dict[str, float]:
        """Counters for metrics, by name."""
        return {}
