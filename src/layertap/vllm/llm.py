"""``LLM(engine="vllm")``: the same calls, run by vLLM."""

from __future__ import annotations

import dataclasses
import os
import queue
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from layertap.config import EngineConfig, check_names
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.errors import InvalidInputError
from layertap.layers import LayerSpec, ServedLayers
from layertap.llm import LLM
from layertap.outputs import RequestOutput
from layertap.prompts import PromptTokenizer, TokenizedPrompt
from layertap.record import HiddenStates
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection
from layertap.sinks.file import check_request_id
from layertap.vllm.arguments import (
    CONNECTOR,
    layer_ids,
    model_layers,
    prepare_cpu,
    speculative_config,
    transfer_config,
)
from layertap.vllm.engine import VllmEngine, VllmRequest


class VllmLLM(LLM):
    """See :class:`layertap.llm.LLM`. Keyword arguments are vLLM's own.

    What is different: without ``kv_transfer_config`` states pass through a temporary folder (in memory where
    ``/dev/shm`` is); ``max_tokens=0`` computes one token and leaves it out; ``"norm"`` is not offered; a
    request that ends at a stop *string* delivers no states, because vLLM aborts it (stop token ids are
    fine).
    """

    _engine = "vllm"

    def _start(
        self,
        model: str,
        layers: LayerSpec | None,
        field: str,
        transfer: KVTransferConfig | None,
        kwargs: dict[str, Any],
    ) -> None:
        _check_names(kwargs)
        path, total = model_layers(model, bool(kwargs.get("trust_remote_code")), kwargs.get("revision"))
        arguments = {"model": path, "disable_log_stats": True, **kwargs}
        if path != model:
            arguments.setdefault("served_model_name", model)
        folder: str | None = None
        served = None
        if layers is not None:
            ids = layer_ids(layers, total, field)
            served = ServedLayers(ids, total)
            if transfer is None:
                folder = tempfile.mkdtemp(prefix="layertap-", dir=_memory_folder())
                transfer = KVTransferConfig(
                    CONNECTOR, kv_connector_extra_config={"shared_storage_path": folder}
                )
            arguments["speculative_config"] = speculative_config(ids)
            arguments["kv_transfer_config"] = transfer_config(
                transfer, ids, record_names=True, owner_pid=os.getpid()
            )
        prepare_cpu(arguments)
        try:
            self._vllm = VllmEngine(arguments, served is not None)
        except BaseException:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._close = weakref.finalize(self, partial(_close, self._vllm, folder))
        self._folder = folder
        config = self._vllm.model_config
        tokenizer = None if config.skip_tokenizer_init else self._vllm.llm.get_tokenizer()
        self.prompt_tokenizer = PromptTokenizer(tokenizer)
        self._hidden_size = int(config.get_hidden_size())
        self._dtype: torch.dtype = config.dtype
        self._num_hidden_layers = total
        # What the shared methods look at.
        core = SimpleNamespace(served=served, tokenizer=tokenizer)
        self._core = core  # type: ignore[assignment]
        scheduler = self._vllm.llm.llm_engine.vllm_config.scheduler_config
        self.config = SimpleNamespace(  # type: ignore[assignment]
            model=config.served_model_name,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        )

    def storage_dtype(self, dtype: str = "auto") -> torch.dtype:
        found = self._dtype if dtype == "auto" else getattr(torch, dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def num_hidden_layers(self) -> int:
        return self._num_hidden_layers

    @property
    def max_model_len(self) -> int:
        return int(self._vllm.model_config.max_model_len)

    def stats(self) -> dict[str, Any]:
        """What is known from outside vLLM's processes; vLLM's own metrics are at its server's
        ``/metrics``."""
        return {"requests_live": self._vllm.num_live}

    def reset_prefix_cache(self) -> None:
        self._vllm.reset_prefix_cache()

    def _extract(self, prompts: Iterator[Any], *args: Any, **kwargs: Any) -> Iterator[HiddenStates]:
        for states in super()._extract(prompts, *args, **kwargs):
            if self._folder is not None and isinstance(states, HiddenStates):
                Path(self._folder, f"{states.request_id}.safetensors").unlink(missing_ok=True)
            yield states

    def _bytes_per_token(self, params: SamplingParams) -> int:
        return len(self._served.ids) * self._hidden_size * self._dtype.itemsize

    @property
    def _served(self) -> ServedLayers:
        served = self._core.served
        assert served is not None
        return served

    def _collector(  # type: ignore[override]
        self,
        name: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        index: int,
        done: queue.SimpleQueue[tuple[int, RequestOutput]],
    ) -> VllmCollector:
        self._vllm.check()
        self._vllm.check_prompt(prompt, params)
        if self._core.served is not None:
            check_request_id(name)
            selection = Selection.parse(params.kv_transfer_params, self._served)
            if not selection.include_output_tokens:
                selection.check_length(len(prompt.token_ids))
        return VllmCollector(name, prompt, params, lambda output: done.put((index, output)))

    def _check_length(self, num_tokens: int, params: SamplingParams, selection: Selection) -> None:
        self._vllm.check_length(num_tokens, params)
        if not selection.include_output_tokens:
            selection.check_length(num_tokens)

    def _computed_while_checking(self) -> float:
        return float("inf")

    def _submit(self, collector: VllmCollector) -> None:  # type: ignore[override]
        for request in collector.requests:
            self._vllm.submit(request)

    def _abort(self, collectors: Iterable[VllmCollector]) -> None:  # type: ignore[override]
        for collector in collectors:
            for request in collector.requests:
                self._vllm.abort(request.request_id)


class VllmCollector:
    """The ``n`` sequences of one prompt, put together when the last one is complete."""

    def __init__(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        on_output: Callable[[RequestOutput], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._on_output = on_output
        self._unfinished = params.n
        self.requests: list[VllmRequest] = []
        for i in range(params.n):
            own, name = params, request_id
            if params.n > 1:
                seed = None if params.seed is None else params.seed + i
                own = dataclasses.replace(params, n=1, seed=seed, extra_args=None)
                name = f"{request_id}-{i}"
            self.requests.append(VllmRequest(name, prompt.token_ids, own, self._note))

    def _note(self, request: VllmRequest) -> None:
        self._unfinished -= 1
        if self._unfinished == 0:
            self._on_output(self.output())

    def output(self) -> RequestOutput:
        first = self.requests[0]
        completions = [r.completion(i) for i, r in enumerate(self.requests)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt.text,
            prompt_token_ids=first.prompt_token_ids,
            outputs=completions,
            finished=True,
            kv_transfer_params=completions[0].kv_transfer_params,
            num_cached_tokens=(first.output and first.output.num_cached_tokens) or 0,
            prompt_logprobs=first.prompt_logprobs(),
            error=next((r.error for r in self.requests if r.error is not None), None),
        )


def _check_names(kwargs: Mapping[str, Any]) -> None:
    """Refuse what vLLM's ``LLM`` does not take, and first of all what only our own engine does."""
    from vllm.engine.arg_utils import EngineArgs

    known = {f.name for f in dataclasses.fields(EngineArgs)} - {"model"}
    ours = {f.name for f in dataclasses.fields(EngineConfig)} - known
    for name in kwargs:
        if name in ours:
            raise InvalidInputError(
                name, kwargs[name], "nothing with engine='vllm': only engine='torch' knows it"
            )
    check_names(kwargs, known)


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _close(engine: VllmEngine, folder: str | None) -> None:
    engine.close()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
