"""vLLM's offline engine behind the same front as the embedded one: submit requests, get told when each is
complete.

One thread steps vLLM (which is not made for several); another waits for files, so that a request is done
only when its record is complete under its final name.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layertap.engine.loop import EngineClosedError
from layertap.errors import ExtractionError, InvalidInputError, UnsupportedModelError
from layertap.outputs import CompletionOutput, Logprob
from layertap.prompts import TokenizedPrompt
from layertap.reader import ERROR_SUFFIX, LOCK_SUFFIX, read_error
from layertap.sampling_params import SamplingParams
from layertap.vllm.connector import RECORD_NAME

logger = logging.getLogger(__name__)

_POLL = 0.002


@dataclass(slots=True, eq=False)
class VllmRequest:
    """One sequence."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    on_done: Callable[[VllmRequest], None]
    output: Any = None
    """vLLM's ``RequestOutput``."""
    kv_transfer_params: dict[str, Any] | None = None
    error: ExtractionError | None = None

    def completion(self, index: int) -> CompletionOutput:
        """In our form. ``max_tokens=0`` ran as one token, which is left out."""
        reason = None if self.error is None else "abort" if self.error.kind == "aborted" else "error"
        if self.output is None or not self.output.outputs:
            return CompletionOutput(index, "", [], reason or "abort")
        theirs = self.output.outputs[0]
        if self.params.max_tokens == 0:
            return CompletionOutput(
                index, "", [], reason or "length", kv_transfer_params=self.kv_transfer_params
            )
        return CompletionOutput(
            index=index,
            text=theirs.text,
            token_ids=list(theirs.token_ids),
            finish_reason=reason or theirs.finish_reason,
            stop_reason=theirs.stop_reason,
            cumulative_logprob=theirs.cumulative_logprob,
            logprobs=[_logprobs(row) for row in theirs.logprobs] if theirs.logprobs else None,
            kv_transfer_params=self.kv_transfer_params,
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        rows = self.output.prompt_logprobs if self.output is not None else None
        return None if not rows else [None if row is None else _logprobs(row) for row in rows]


def _logprobs(row: Any) -> dict[int, Logprob]:
    return {token: Logprob(entry.logprob, entry.rank, entry.decoded_token) for token, entry in row.items()}


class VllmEngine:
    """Owns a ``vllm.LLM``.

    Args:
        arguments: keyword arguments of ``vllm.LLM``.
        delivers: whether our connector is in it.
    """

    def __init__(self, arguments: dict[str, Any], delivers: bool) -> None:
        import vllm

        try:
            self.llm = vllm.LLM(**arguments)
        except Exception as error:
            _clean_up()
            if delivers and _hands_out_no_states(arguments, error):
                raise UnsupportedModelError(
                    f"vLLM {vllm.__version__} hands out no hidden states of this model class ({error}); "
                    "use engine='torch'"
                ) from error
            raise
        self.delivers = delivers
        self._engine = self.llm.llm_engine
        # With vLLM's core in this process, nobody else steps it until the last blocks are free.
        self._core = getattr(self._engine.engine_core, "engine_core", None)
        self._sampling_params = vllm.SamplingParams
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliveries: queue.SimpleQueue[VllmRequest | None] = queue.SimpleQueue()
        self._live: dict[str, VllmRequest] = {}
        self._closed = False
        self._failure: str | None = None
        self._threads = [
            threading.Thread(target=self._run, name="layertap-vllm", daemon=True),
            threading.Thread(target=self._deliver, name="layertap-vllm-files", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def model_config(self) -> Any:
        return self._engine.model_config

    @property
    def num_live(self) -> int:
        """Requests that are not yet complete."""
        return len(self._live)

    def submit(self, request: VllmRequest) -> None:
        """Queue a request whose prompt :meth:`check_prompt` has passed.

        Raises:
            InvalidInputError: its id is in use.
            EngineClosedError: nothing will run any more.
        """
        self.check()
        if request.request_id in self._live:
            raise InvalidInputError("request_id", request.request_id, "an id that is not in use")
        self._live[request.request_id] = request
        self._inbox.put(lambda: self._add(request))

    def check(self) -> None:
        """Raises:
        EngineClosedError: nothing will run any more.
        """
        if self._failure is not None:
            raise EngineClosedError(self._failure)
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def check_prompt(self, prompt: TokenizedPrompt, params: SamplingParams) -> None:
        """Refuse a prompt that does not fit the model.

        Raises:
            InvalidInputError: it is too long, or has a token that the vocabulary does not.
        """
        self.check_length(len(prompt.token_ids), params)
        prompt.check_vocabulary(int(self.model_config.get_vocab_size()))

    def check_length(self, num_tokens: int, params: SamplingParams) -> None:
        """Refuse a prompt by its number of tokens.

        Raises:
            InvalidInputError: it is empty, or too long with its output.
        """
        longest = int(self.model_config.max_model_len)
        if not num_tokens:
            raise InvalidInputError("prompt", [], "at least one token")
        if num_tokens + max(1, params.max_tokens) > longest:
            raise InvalidInputError(
                "prompt",
                f"{num_tokens} tokens",
                f"prompt and output of at most {longest} tokens together (max_model_len)",
            )

    def abort(self, request_id: str) -> None:
        """End a request as soon as possible; nothing of it is published unless it was complete."""
        self._inbox.put(lambda: self._abort(request_id))

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, between steps.

        Raises:
            EngineClosedError: nothing will run any more.
        """
        self.check()
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((function(), None))
            except Exception as error:  # noqa: BLE001 - raised in the caller
                answer.put((None, error))

        self._inbox.put(run)
        result, error = answer.get()
        if error is not None:
            raise error
        return result

    def reset_prefix_cache(self) -> None:
        self.call(self._engine.reset_prefix_cache)

    def close(self) -> None:
        """Abort what runs and end vLLM's processes."""
        if self._closed:
            return
        self._closed = True
        for request_id in list(self._live):
            self.abort(request_id)
        self._inbox.put(None)
        self._threads[0].join()
        self._deliveries.put(None)
        self._threads[1].join()
        self._engine.engine_core.shutdown()
        if self._core is not None:
            _clean_up()

    # --- the engine's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            idle = not self._has_work()
            try:
                task = self._inbox.get(block=idle)
            except queue.Empty:
                self._step()
                continue
            if task is None:
                return
            task()

    def _has_work(self) -> bool:
        if self._failure is not None:
            return False
        return self._engine.has_unfinished_requests() or (
            self._core is not None and self._core.scheduler.has_requests()
        )

    def _step(self) -> None:
        try:
            if self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        self._note(output)
            else:
                assert self._core is not None
                self._core.step_fn()
                time.sleep(0.0005)  # only blocks that are being copied are waited for
        except Exception as error:
            logger.exception("vLLM's engine failed")
            self._failure = f"vLLM's engine failed: {type(error).__name__}: {error}"
            for request in list(self._live.values()):
                self._fail(request, self._failure, "engine")

    def _add(self, request: VllmRequest) -> None:
        if request.request_id not in self._live:
            return  # aborted in the meantime
        if self._failure is not None:
            self._fail(request, self._failure, "engine")
            return
        try:
            prompt = {"prompt_token_ids": request.prompt_token_ids}
            self._engine.add_request(request.request_id, prompt, self._params(request))
        except (ValueError, TypeError) as error:
            # What vLLM has noted of it before would have its next step wait for an answer that never comes.
            self._engine.abort_request([request.request_id])
            self._fail(request, str(error), "invalid_input")

    def _abort(self, request_id: str) -> None:
        request = self._live.get(request_id)
        if request is None or request.output is not None:
            return
        if self._failure is None:
            self._engine.abort_request([request_id])
        self._fail(request, "aborted; nothing was published", "aborted")

    def _note(self, output: Any) -> None:
        request = self._live.get(output.request_id)
        if request is not None:
            request.output = output
            self._deliveries.put(request)

    def _fail(self, request: VllmRequest, reason: str, kind: str) -> None:
        request.error = ExtractionError(request.request_id, reason, kind)
        self._live.pop(request.request_id, None)
        request.on_done(request)

    def _params(self, request: VllmRequest) -> Any:
        ours = request.params
        extra: dict[str, Any] = {RECORD_NAME: request.request_id}
        if ours.kv_transfer_params is not None:
            extra["kv_transfer_params"] = dict(ours.kv_transfer_params)
        return self._sampling_params(
            max_tokens=max(1, ours.max_tokens),
            temperature=ours.temperature,
            top_p=ours.top_p,
            top_k=ours.top_k,
            seed=ours.seed,
            stop=list(ours.stop_strings) or None,
            stop_token_ids=list(ours.stop_token_ids) if ours.stop_token_ids else None,
            ignore_eos=ours.ignore_eos,
            min_tokens=min(ours.min_tokens, max(1, ours.max_tokens)),
            logprobs=ours.logprobs,
            prompt_logprobs=ours.prompt_logprobs,
            skip_special_tokens=ours.skip_special_tokens,
            detokenize=ours.detokenize and not self.model_config.skip_tokenizer_init,
            extra_args=extra,
        )

    # --- the thread that waits for files -------------------------------------------------------------------

    def _deliver(self) -> None:
        while (request := self._deliveries.get()) is not None:
            if self.delivers:
                self._await_record(request)
            self._live.pop(request.request_id, None)
            request.on_done(request)

    def _await_record(self, request: VllmRequest) -> None:
        answer = request.output.kv_transfer_params or {}
        path = answer.get("hidden_states_path")
        if path is None:
            request.error = ExtractionError(
                request.request_id,
                "vLLM ended it at a stop string, which it does by aborting: no states are delivered then; "
                "use stop_token_ids",
            )
            return
        request.error = self._wait(path, request.request_id)
        if request.error is None:
            request.kv_transfer_params = {"hidden_states_path": path}
        for suffix in (LOCK_SUFFIX, ERROR_SUFFIX):
            Path(path + suffix).unlink(missing_ok=True)

    def _wait(self, path: str, request_id: str) -> ExtractionError | None:
        """Sleep until the writer lets go; why there is no record, or None."""
        while True:
            locked = False
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path + LOCK_SUFFIX, os.O_RDWR | os.O_CLOEXEC)
                locked = True
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH)
                finally:
                    os.close(fd)
            error = read_error(path)
            if error is not None or os.path.exists(path):
                return error
            if locked or self._failure is not None or self._closed:
                reason = self._failure or "its writer let go of it, but there is no file"
                return ExtractionError(request_id, reason)
            time.sleep(_POLL)


def _hands_out_no_states(arguments: dict[str, Any], error: Exception) -> bool:
    """Whether vLLM failed to start because its class for this model has no ``SupportsEagle3``.

    An engine process tells its parent only that it failed, so the class is looked at again.
    """
    if "EAGLE3" in str(error):
        return True
    if "initialization failed" not in str(error):
        return False
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    return not supports_eagle3(get_model_cls(EngineArgs(**arguments).create_model_config()))


def _clean_up() -> None:
    """Forget the process groups of an engine in this process, so that another one can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
