"""``LayertapConnector``: a thin shell that puts our producer under vLLM's connector API.

The scheduler's half reads requests and decides what to keep of them; the worker's half
(:mod:`layertap.vllm.worker`) copies and writes. A :class:`StepNotes` goes from the one to the other with
each step.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.extract_hidden_states import basic_cache

from layertap.connectors.file import FileConnector
from layertap.connectors.job import Job
from layertap.connectors.producing import GPU_DEFAULTS, check_options
from layertap.errors import InvalidInputError
from layertap.selection import Selection
from layertap.sinks.file import REQUEST_ID, SUFFIX
from layertap.vllm.owner import belong_to
from layertap.vllm.plan import CachePlan, as_BSCH, cache_of, check_version, writes_slots_last
from layertap.vllm.worker import CacheWriter, Save

# Ended by the engine itself, with all of the prompt computed. Aborted, ignored and failed requests publish
# nothing.
_COMPLETE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
RECORD_NAME = "layertap_record"
_EXTRA = "kv_transfer_config.kv_connector_extra_config"


@dataclass(slots=True)
class StepNotes(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the worker in one step."""

    step: int = 0
    begun: list[str] = field(default_factory=list)
    """Paths of requests that have their first step: to be locked."""
    saves: list[Save] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Path -> why nothing will be published there."""
    dropped: list[str] = field(default_factory=list)
    """Paths of aborted requests."""


@dataclass(slots=True)
class _Entry:
    name: str
    """Of the record: vLLM's request id, unless ``record_names`` is on."""
    path: str
    selection: Selection | None = None
    refusal: str | None = None


class LayertapConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Delivers hidden states out of vLLM, for the speculative method ``extract_hidden_states``.

    Answers ``kv_transfer_params: {"hidden_states_path": ...}``, and ``"error"`` beside it where nothing
    will come. Options in ``kv_connector_extra_config``: those of
    :class:`~layertap.connectors.file.FileConnector`, and
        ``layers``: the columns of a record by default, in order, repetitions kept; the ids of the speculative
        configuration, which must not repeat one.
        ``record_names``: a request may name its record, by ``extra_args["layertap_record"]`` of its sampling
        parameters. For use within one program (``LLM(engine="vllm")``), where nobody else sends requests.
        ``owner_pid``: the program that the processes belong to (see :mod:`layertap.vllm.owner`); set by
        ``LLM(engine="vllm")``.
        ``allow_custom_save_path``: vLLM's; must be false, since nothing that a client sends chooses a path.

    Raises:
        UnsupportedVllmError: this vLLM, or its cache, is not what the connector knows.
        InvalidInputError: an option or a layer id is wrong; the message names it and what is allowed.
    """

    options: ClassVar[dict[str, Any]] = {
        **FileConnector.options,
        "record_names": False,
        "allow_custom_save_path": False,
    }

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm.__version__)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        requested = extra.pop("layers", None)
        owner_pid = extra.pop("owner_pid", None)
        if owner_pid is not None:
            belong_to(owner_pid)
        on_gpu = vllm_config.device_config.device_type == "cuda"
        self._options = check_options(extra, self.options | (GPU_DEFAULTS if on_gpu else {}))
        self._options["shared_storage_path"] = os.path.abspath(self._options["shared_storage_path"])
        if self._options["allow_custom_save_path"]:
            raise InvalidInputError(f"{_EXTRA}.allow_custom_save_path", True, "false")
        self._plan = CachePlan.read(vllm_config, kv_cache_config, requested)
        self._entries: dict[str, _Entry] = {}
        self._notes = StepNotes()
        self._last_step: dict[str, int] = {}
        """The last step that computes something of a request."""
        self._writer: CacheWriter | None = None
        self._taken: StepNotes | None = None

    # --- scheduler -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Read what a request wants to keep. vLLM has no way to refuse it here: it runs, and is told why at
        its end."""
        name: str = request.request_id
        if self._options["record_names"]:
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            name = extra.get(RECORD_NAME, name)
        refusal = None
        selection = None
        try:
            if not REQUEST_ID.fullmatch(name):
                raise InvalidInputError("request_id", name, "letters, digits and _ . : = + @ -")
            if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
                raise InvalidInputError("prompt_embeds", "...", "token ids or text: a record holds token ids")
            selection = Selection.parse(request.kv_transfer_params, self._plan.layers)
            if not selection.include_output_tokens:
                selection.check_length(len(request.prompt_token_ids))
        except InvalidInputError as error:
            refusal = str(error)
        self._entries[request.request_id] = _Entry(name, self._path(name), selection, refusal)

    def _path(self, name: str) -> str:
        if not REQUEST_ID.fullmatch(name):
            name = "refused-" + hashlib.sha256(name.encode()).hexdigest()[:16]
        return f"{self._options['shared_storage_path']}/{name}{SUFFIX}"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert num_external_tokens == 0, "nothing is ever loaded"

    def build_connector_meta(self, scheduler_output: Any) -> StepNotes:
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._entries:
                self._notes.begun.append(self._entries[new.req_id].path)
        notes, self._notes = self._notes, StepNotes(self._notes.step + 1)
        for request_id in scheduler_output.num_scheduled_tokens:
            self._last_step[request_id] = notes.step
        return notes

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Queue the request for the worker. Its blocks stay allocated until the worker has copied them."""
        entry = self._entries.pop(request.request_id, None)
        last_step = self._last_step.pop(request.request_id, self._notes.step)
        if entry is None:
            return False, None
        if request.status.name not in _COMPLETE or not request.output_token_ids:
            self._notes.dropped.append(entry.path)
            return False, None
        answer: dict[str, Any] = {"hidden_states_path": entry.path}
        if entry.selection is not None and entry.refusal is None:
            job = _job(request, entry.name, entry.selection, block_ids[self._plan.group])
            try:
                entry.selection.check_length(job.num_states)
            except InvalidInputError as error:
                entry.refusal = str(error)
            else:
                self._notes.saves.append(Save(request.request_id, job, entry.path, last_step))
                return True, answer
        self._notes.failed[entry.path] = entry.refusal or ""
        return False, answer | {"error": entry.refusal}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # --- worker --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        cache = cache_of(kv_caches)
        if cache is None or get_tensor_model_parallel_rank() != 0:
            return  # this rank writes nothing
        view = as_BSCH(cache, self._plan, writes_slots_last(basic_cache))
        self._writer = CacheWriter(view, self._plan, self._options)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Each step's first call (some versions make it after the forward): nothing is loaded, ended
        requests are handed on. Where it precedes the forward, their copies run beside it."""
        self._take_notes()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._take_notes()
        if self._writer is None:
            return None, None
        return self._writer.take_copied() or None, None

    def get_finished_count(self) -> int:
        """One rank reports each request."""
        return 1

    def _take_notes(self) -> None:
        if self._writer is None or not self.has_connector_metadata():
            return
        notes = self._get_connector_metadata()
        if notes is self._taken or not isinstance(notes, StepNotes):
            return
        self._taken = notes
        self._writer.begin_step(notes.step)
        self._writer.begin(notes.begun)
        for path in notes.dropped:
            self._writer.drop(path)
        for path, reason in notes.failed.items():
            self._writer.refuse(path, reason)
        self._writer.save(notes.saves)

    def shutdown(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _job(request: Any, name: str, selection: Selection, block_ids: list[int]) -> Job:
    prompt = list(request.prompt_token_ids)
    token_ids = prompt
    num_tokens = len(prompt)
    if selection.include_output_tokens:
        token_ids = list(request.all_token_ids)
        num_tokens = len(token_ids) - 1  # the last token was never an input
    return Job(name, token_ids, num_tokens, len(prompt), list(block_ids), selection)
