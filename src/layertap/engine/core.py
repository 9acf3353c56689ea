"""The engine's heart: one ``step()`` schedules, runs, samples, and moves finished requests on to the
connector."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from layertap.config import EngineConfig
from layertap.connectors.base import KVConnectorBase
from layertap.connectors.registry import create_connector
from layertap.connectors.transfer_config import EngineInfo, KVTransferConfig
from layertap.engine import loader
from layertap.engine.admission import Admission
from layertap.engine.block_pool import BlockPool
from layertap.engine.compile import compile_runner, wants_compiled
from layertap.engine.cpu_memory import keep_freed_memory
from layertap.engine.detokenizer import Detokenizer
from layertap.engine.device_start import DeviceStart
from layertap.engine.hold import Hold
from layertap.engine.memory import cache_bytes, num_blocks_for
from layertap.engine.postprocess import Postprocessor
from layertap.engine.request import Request, RequestStatus
from layertap.engine.runner import ModelRunner, StepLogits
from layertap.engine.sampler import DrawnTokens, sample
from layertap.engine.scheduler import Scheduler, SchedulerOutput
from layertap.engine.start_phases import StartPhases
from layertap.engine.step_clock import StepClock
from layertap.engine.verifier import Verifier, load_verifier, pick_device
from layertap.errors import ExtractionError, InvalidInputError
from layertap.layers import ServedLayers, parse_layers
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams

logger = logging.getLogger("layertap")

_CPU_STEP_TOKENS = 4096
_CUDA_STEP_TOKENS = 16384
_LOOK_SECONDS = 0.002  # between looks at whether a step has ended


@dataclass(slots=True)
class _Launched:
    """A step whose tokens have been drawn on the device but not yet looked at."""

    output: SchedulerOutput
    logits: StepLogits
    tokens: DrawnTokens | None

    @property
    def there(self) -> bool:
        """Looking at it would not wait."""
        if self.tokens is None:
            return not self.logits.prompt  # with nothing to read from the device
        return self.tokens.there


class EngineCore:
    """Everything between an admitted request and its handle. Used by one thread.

    Args:
        config: the engine's configuration.
        kv_transfer_config: where hidden states go; needed if ``config.layers`` is given.
    """

    def __init__(self, config: EngineConfig, kv_transfer_config: KVTransferConfig | None) -> None:
        self.config = config
        self.start_phases = StartPhases()
        self.device = pick_device(config)
        self.start_phases.end("device")
        if self.device.type == "cpu":
            keep_freed_memory()
        source = loader.prepare_source(config.model)
        self.hf_path = source.path
        """Folder or hub id that ``transformers`` reads the model from."""
        with DeviceStart(self.device):
            hf_config = loader.load_config(source, config)
            total = loader.num_hidden_layers(hf_config)
            self.served = (
                ServedLayers(parse_layers(config.layers, total), total) if config.layers is not None else None
            )
            self.start_phases.end("configuration")
            self.tokenizer = loader.load_tokenizer(config, source)
            self.start_phases.end("tokenizer")
            loader.model_class(hf_config)  # imports what defines it
            self.start_phases.end("model's class")
        self.start_phases.end("the device's own start")
        keep = max(1, self.served.highest) if self.served is not None and config.extract_only else total
        self.verifier: Verifier = load_verifier(
            config, source, hf_config, keep, self.device, self.start_phases
        )
        self.eos_token_ids = _eos_token_ids(self.verifier.model, self.tokenizer)
        budget = config.max_num_batched_tokens or (
            _CUDA_STEP_TOKENS if self.device.type == "cuda" else _CPU_STEP_TOKENS
        )
        config.max_num_batched_tokens = budget
        hidden_bytes = 0
        if self.served is not None:
            hidden_bytes = len(self.served.columns) * self.verifier.hidden_size * self.verifier.dtype.itemsize
        activation = self._activation_bytes(budget)
        self.start_phases.end("memory")
        num_blocks = num_blocks_for(
            config, self.verifier, hidden_bytes, cache_bytes(config, self.device, activation)
        )
        packed = self.verifier.packed
        self.pool = BlockPool(num_blocks, config.enable_prefix_caching and packed)
        self.scheduler = Scheduler(
            self.pool,
            config.block_size,
            budget,
            config.max_num_seqs,
            whole_sequences=not packed,
            avoid_splitting=self.device.type == "cpu",
            last_in_two=self.device.type == "cuda" and self.served is not None,
            # Keys and values of prompts that are computed whole are not stored then.
            fill_with_whole=self.device.type == "cuda" and packed and not self.pool.enable_prefix_caching,
        )
        self.runner = ModelRunner(
            self.verifier, self.served, num_blocks, config.block_size, self.pool.enable_prefix_caching
        )
        self.start_phases.end("caches")
        self.compiled = compile_runner(self.runner, config, self.start_phases)
        self.connector: KVConnectorBase | None = None
        if self.served is not None:
            assert self.runner.draft is not None
            info = EngineInfo(
                model=config.model,
                layers=self.served,
                hidden_size=self.verifier.hidden_size,
                dtype=self.verifier.dtype,
                block_size=config.block_size,
                num_blocks=num_blocks + 1,
                device=self.device,
            )
            transfer = kv_transfer_config or KVTransferConfig(kv_connector="MemoryConnector")
            self.connector = create_connector(transfer, info)
            self.connector.register_kv_caches({"hidden_states": self.runner.draft.kv_cache})
        self.detokenizer = Detokenizer(self.tokenizer)
        self._postprocessor = Postprocessor(self.detokenizer, self.eos_token_ids, self.max_model_len)
        self._admission = Admission(
            config,
            vocab_size=self.verifier.vocab_size,
            max_model_len=self.max_model_len,
            has_tokenizer=self.tokenizer is not None,
            eos_token_ids=self.eos_token_ids,
            served=self.served,
            connector=self.connector,
        )
        self.generator = torch.Generator(device=self.device).manual_seed(config.seed)
        self.requests: dict[str, Request] = {}
        """Every request that has not given its final output yet."""
        self._leaving: dict[str, Request] = {}
        """Computed; the connector still copies or stores its states."""
        self._pinned: dict[str, Request] = {}
        """Requests whose blocks the connector still reads."""
        self._launched: deque[_Launched] = deque()
        self._clock = StepClock()
        self._holds: set[Hold] = set()
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.start_phases.end("connector")
        logger.info("started in %s", self.start_phases)

    # --- admission -----------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return self.verifier.max_model_len

    def make_request(
        self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams, cache_salt: str = ""
    ) -> Request:
        """Check a request against the model and build it. Safe to call from any thread.

        Raises:
            InvalidInputError: naming the field that is wrong, before any work starts.
        """
        return self._admission.make_request(request_id, prompt, params, cache_salt)

    def check_length(self, num_tokens: int, params: SamplingParams) -> None:
        """Refuse a prompt by its number of tokens. Safe to call from any thread.

        Raises:
            InvalidInputError: it is empty or too long, or leaves no room for output.
        """
        self._admission.check_length(num_tokens, params)

    def add_request(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            InvalidInputError: its id is in use.
        """
        if request.request_id in self.requests:
            raise InvalidInputError("request_id", request.request_id, "an id that no running request has")
        self.requests[request.request_id] = request
        if request.hold is not None:
            self._holds.add(request.hold)
        self.scheduler.add(request)

    def abort(self, wanted: Request | str) -> None:
        """End a request, or the one with an id, wherever it is. Its blocks return; nothing is published for
        it. Unknown ones are ignored."""
        request_id = wanted if isinstance(wanted, str) else wanted.request_id
        request = self.requests.get(request_id)
        if request is None or wanted not in (request, request_id):
            return  # another call's has this id
        request.error = ExtractionError(request_id, "aborted", "aborted")
        if request_id in self._leaving:
            assert self.connector is not None
            request.status = RequestStatus.ABORTED
            self.connector.cancel(request_id)
            return
        self.scheduler.remove(request)
        request.status = RequestStatus.ABORTED
        self.scheduler.free(request)
        request.model_state = None
        self._finish(request)

    def _look_at_holds(self) -> None:
        """Forget those that were released, and end the requests of those that will not be."""
        if not self._holds:
            return
        for hold in [h for h in self._holds if h.lost]:
            self._holds.remove(hold)
            for request in [r for r in self.requests.values() if r.hold is hold]:
                self.abort(request)
        self._holds = {h for h in self._holds if not h.released}

    @staticmethod
    def _holds_back(step: _Launched) -> bool:
        """Whether there are requests in it of which nothing may be handed out yet."""
        return any(
            r.hold is not None and not r.hold.released and not r.status.finished
            for r in (s.request for s in step.output.scheduled)
        )

    # --- the step ------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._pinned)

    def step(self) -> bool:
        """One round: collect what the connector has done, run one batch, move finished requests on.

        Returns:
            False if nothing could be done now: the caller may wait on the connector.
        """
        progressed = self._collect()
        self._clock.look()
        self._look_at_holds()
        if len(self._launched) > 1 and self._holds_back(self._launched[0]):
            time.sleep(_LOOK_SECONDS)
            return True
        if self._gains_by_waiting():
            self._pause()
            while self._launched and self._launched[0].there and not self._holds_back(self._launched[0]):
                self._finalize(self._launched.popleft())
            return True
        self.scheduler.more_to_come = bool(self._holds)
        output = self.scheduler.schedule()
        for request in output.preempted:
            logger.debug("request %s was preempted", request.request_id)
        if output.scheduled:
            self._launch(output)
            progressed = True
        # A step's tokens are looked at one step later where nothing depends on them sooner.
        keep = 1 if output.scheduled and self._may_lag(output) else 0
        while len(self._launched) > keep:
            if self._holds_back(self._launched[0]):
                if not progressed:
                    time.sleep(_LOOK_SECONDS)
                return True
            self._tell_until_computed(self._launched[0])
            self._await(self._launched[0])
            self._finalize(self._launched.popleft())
            progressed = True
        return progressed

    def _gains_by_waiting(self) -> bool:
        """Whether the next step would not be full, and there is time: others may arrive and go with it."""
        return self._clock.seconds_to_spare() > 0 and not self.scheduler.has_full_step

    def _pause(self) -> None:
        """For news, or a moment."""
        seconds = min(_LOOK_SECONDS, self._clock.seconds_to_spare())
        if self.connector is not None and self._leaving:
            self.connector.wait(seconds)
        else:
            time.sleep(seconds)

    def _tell_until_computed(self, step: _Launched) -> None:
        """While a step runs, tell of the records that are stored meanwhile: whoever waits for one may send
        the next prompt in time for the next step but one."""
        if self.connector is None or step.tokens is None or len(self._launched) < 2:
            return  # with nothing launched behind it, its end is not to be noticed late
        while self._leaving and not step.there:
            self.connector.wait(_LOOK_SECONDS)
            self._collect()
            self._clock.look()

    def _await(self, step: _Launched) -> None:
        """Until its tokens are there, so that the clock sees when the step ends."""
        if not step.there and step.tokens is not None:
            step.tokens.tolist()
            self._clock.look(waited=True)

    def wait(self, timeout: float) -> None:
        """Sleep until the connector may have made progress."""
        if self.connector is not None and (self._leaving or self._pinned):
            self.connector.wait(timeout)

    def _may_lag(self, output: SchedulerOutput) -> bool:
        """True on CUDA if every sampling request of the step ends with this token, whatever it is."""
        return self.device.type == "cuda" and all(
            s.request.max_tokens <= len(s.request.output_token_ids) + 1 for s in output.scheduled if s.samples
        )

    def _launch(self, output: SchedulerOutput) -> None:
        begun = time.monotonic()
        if self.connector is not None:
            self.connector.build_connector_meta(output)
        try:
            logits = self.runner.execute(output.scheduled)
            requests = [s.request for s in logits.sampling]
            tokens = None
            if requests:
                assert logits.rows is not None
                tokens = DrawnTokens(sample(logits.rows, requests, self.generator))
            if self.device.type == "cuda":
                # Now: when a request is found to have ended, the next step has been launched already.
                ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ready.record(torch.cuda.current_stream(self.device))
                for s in output.scheduled:
                    s.request.states_ready = ready
                self._clock.launched(output.total_num_scheduled_tokens, begun, ready.query)
        except (RuntimeError, ValueError, IndexError, MemoryError) as e:
            self._fail(output, e)
            return
        self.num_steps += 1
        self.num_computed_tokens += output.total_num_scheduled_tokens
        self._launched.append(_Launched(output, logits, tokens))

    def _fail(self, output: SchedulerOutput, error: Exception) -> None:
        logger.exception("a step failed; its %d requests fail with it", len(output.scheduled))
        self.scheduler.forget_unfilled(output)
        reason = f"the model failed on this batch ({type(error).__name__}: {loader.first_line(error)})"
        for s in output.scheduled:
            request = s.request
            self.scheduler.remove(request)
            request.status = RequestStatus.ERROR
            request.error = ExtractionError(request.request_id, reason, "engine")
            self.scheduler.free(request)
            request.model_state = None
            self._finish(request)

    def _finalize(self, step: _Launched) -> None:
        for request in self._postprocessor.take(step.output.scheduled, step.logits, step.tokens):
            self._leave(request)

    def _leave(self, request: Request) -> None:
        """A request is computed: hand its states to the connector, or finish it."""
        self.scheduler.running.remove(request)
        request.model_state = None
        request.metrics.computed = time.monotonic()
        if self.connector is None:
            self.scheduler.free(request)
            self._finish(request)
            return
        delay_free, params = self.connector.request_finished(request, list(request.block_ids))
        request.kv_transfer_params = params
        if delay_free:
            self._pinned[request.request_id] = request
            self._leaving[request.request_id] = request
        else:
            self.scheduler.free(request)
            self._finish(request)

    def _collect(self) -> bool:
        """Take what the connector has done: free copied blocks, finish stored requests."""
        if self.connector is None or not (self._leaving or self._pinned):
            return False
        progressed = False
        sent, _received = self.connector.get_finished(set())
        for request_id in sent or ():
            request = self._pinned.pop(request_id, None)
            if request is not None:
                self.scheduler.free(request)
                progressed = True
        for request_id, result in self.connector.take_completed().items():
            request = self._leaving.pop(request_id, None)
            if request is None:
                continue
            progressed = True
            if isinstance(result, ExtractionError):
                if request.status is not RequestStatus.ABORTED:
                    request.status = RequestStatus.ERROR
                    request.error = result
                request.kv_transfer_params = None
            else:
                request.kv_transfer_params = result
                # Stored before the abort arrived: the record is whole, and stays.
                request.error = None
            request.metrics.stored = time.monotonic()
            self._finish(request)
        return progressed

    def _finish(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        told, request.on_output = request.on_output, None  # it refers to the request: a cycle
        if told is not None:
            told(request, True)

    # --- the end -------------------------------------------------------------------------------------------

    def _activation_bytes(self, budget: int) -> int:
        """What a full step needs beside the weights; measured on CUDA, not needed elsewhere."""
        if self.device.type != "cuda":
            return 0
        from layertap.engine.profile import measure_step

        needed = measure_step(self.verifier, budget)
        # What is recorded keeps its memory for itself.
        return 2 * needed if wants_compiled(self.config, self.device) else needed

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine and its connector."""
        s = self.scheduler
        return {
            "num_running": len(s.running),
            "num_waiting": len(s.waiting),
            "num_storing": len(self._leaving),
            "num_steps": self.num_steps,
            "num_computed_tokens": self.num_computed_tokens,
            "num_preemptions": s.num_preemptions,
            "prefix_cache_queries": s.prefix_queries,
            "prefix_cache_hits": s.prefix_hits,
            "num_blocks": self.pool.num_blocks,
            "num_free_blocks": self.pool.num_free,
            "connector": self.connector.stats() if self.connector is not None else {},
        }

    def close(self) -> None:
        """Abort what runs, end the connector's threads, drop the model."""
        for request_id in list(self.requests):
            self.abort(request_id)
        deadline = time.monotonic() + 30
        while self._leaving and time.monotonic() < deadline:
            if not self._collect():
                self.wait(0.05)
        if self.connector is not None:
            self.connector.close(drain=False)
        self._collect()
        self.connector = self._admission.connector = None  # it refers to the cache
        self.runner.close()
        self._launched.clear()
        self.verifier.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    sources = [getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer]
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif isinstance(ids, list | tuple):
            found.update(i for i in ids if isinstance(i, int))
    return frozenset(found)
