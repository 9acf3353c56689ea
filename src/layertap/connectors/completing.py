"""Completes the answers of a connector that only knows vLLM's own methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layertap.connectors.base import FinishedRequest, KVConnectorBase, Outcome, Params


class CompletingConnector(KVConnectorBase):
    """Wraps a connector without ``take_completed``: a request is complete once its blocks are let go."""

    def __init__(self, inner: KVConnectorBase) -> None:
        super().__init__(inner.kv_transfer_config, inner.engine_info)
        self.inner = inner
        self._pending: dict[str, Params] = {}
        self._completed: dict[str, Outcome] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.inner.register_kv_caches(kv_caches)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.inner.build_connector_meta(scheduler_output)

    def request_finished(self, request: FinishedRequest, block_ids: list[int]) -> tuple[bool, Params | None]:
        delay_free, params = self.inner.request_finished(request, block_ids)
        (self._pending if delay_free else self._completed)[request.request_id] = params or {}
        return delay_free, params

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self.inner.get_finished(finished_req_ids)
        for request_id in sent or ():
            if request_id in self._pending:
                self._completed[request_id] = self._pending.pop(request_id)
        return sent, received

    def take_completed(self) -> dict[str, Outcome]:
        completed, self._completed = self._completed, {}
        return completed

    def check_request(self, params: Mapping[str, Any] | None, request_id: str | None = None) -> None:
        self.inner.check_request(params, request_id)

    def cancel(self, request_id: str) -> bool:
        self._completed.pop(request_id, None)
        pending = self._pending.pop(request_id, None)
        return self.inner.cancel(request_id) or pending is not None

    def wait(self, timeout: float) -> None:
        if not self._completed:
            self.inner.wait(timeout)

    def close(self, drain: bool = True) -> None:
        self.inner.close(drain)

    def stats(self) -> dict[str, float]:
        return self.inner.stats()
