"""The least that gets hidden states out of vLLM's CPU build: the peer that ``layertap bench`` compares with.

vLLM's own connector asks for pinned memory and CUDA streams, so it does not run on a CPU. This one does
only what it must: it gathers a finished request's rows from the paged cache and writes one safetensors
file, in threads that do not hold the GIL, while the engine computes the next step. No selection, checks,
metadata or locks.

Needs vLLM, torch and safetensors, and nothing of layertap. Loaded through ``kv_connector_module_path``.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


@dataclass
class Save:
    request_id: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]
    saves: list[Save] = field(default_factory=list)


class PeerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Writes ``{shared_storage_path}/{request_id}.safetensors``, renamed into place when complete."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = self._kv_transfer_config
        self.folder: str = config.get_from_extra_config("shared_storage_path", "/tmp")
        self.saves: list[Save] = []
        self.writing: dict[str, Future[None]] = {}
        self.threads = ThreadPoolExecutor(int(config.get_from_extra_config("num_writer_threads", 2)))
        groups = kv_cache_config.kv_cache_groups
        self.group = next(
            i for i, group in enumerate(groups) if any("cache_only" in name for name in group.layer_names)
        )
        self.block_size = int(groups[self.group].kv_cache_spec.block_size)

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Saves:
        saves, self.saves = self.saves, []
        return Saves(saves)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self.saves.append(Save(request_id, list(request.prompt_token_ids), list(block_ids[self.group])))
        return True, {"hidden_states_path": os.path.join(self.folder, f"{request_id}.safetensors")}

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        (cache,) = (tensor for name, tensor in kv_caches.items() if "cache_only" in name)
        layers = len(
            self._vllm_config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids
        )
        if cache.shape[1:3] == (layers, self.block_size):  # vLLM 0.32: [blocks, L, block, H]
            cache = cache.transpose(1, 2)
        assert cache.shape[1:3] == (self.block_size, layers), cache.shape
        self.cache_BSLH = cache

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished_count(self) -> int:
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata():
            for save in self._get_connector_metadata().saves:
                self.writing[save.request_id] = self.threads.submit(self.write, save)
        done = {request_id for request_id, future in self.writing.items() if future.done()}
        for request_id in done:
            self.writing.pop(request_id).result()
        return done or None, None

    def write(self, save: Save) -> None:
        num_tokens = len(save.token_ids)
        hidden_TLH = self.cache_BSLH[torch.tensor(save.block_ids)].flatten(0, 1)[:num_tokens].contiguous()
        path = os.path.join(self.folder, f"{save.request_id}.safetensors")
        save_file({"token_ids": torch.tensor(save.token_ids), "hidden_states": hidden_TLH}, path + ".part")
        os.rename(path + ".part", path)

    def shutdown(self) -> None:
        self.threads.shutdown(wait=True)
