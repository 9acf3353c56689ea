"""``LLM``: hidden states (and text) of many prompts, from Python.

``generate`` is vLLM's call; ``extract`` is an iterator over hidden states with no disk in between.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import queue
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from layertap.checked_ahead import check_ahead, is_checked_ahead, of_prompt
from layertap.checked_submission import submit_checked
from layertap.config import SPECULATIVE_LAYERS, EngineConfig, check_engine_name, layers_of_speculative_config
from layertap.connectors.transfer_config import KVTransferConfig
from layertap.engine.collector import OutputCollector
from layertap.engine.core import EngineCore
from layertap.engine.loop import EngineLoop
from layertap.engine.standing_heap import standing_heap
from layertap.errors import ExtractionError, InvalidInputError
from layertap.extraction import LEAST_BUFFER_BYTES, Extraction
from layertap.layers import LayerSpec, ServedLayers
from layertap.outputs import RequestOutput
from layertap.progress import Progress
from layertap.prompts import PromptTokenizer, TokenizedPrompt, as_iterable, as_list, is_single
from layertap.record import HiddenStates
from layertap.sampling_params import SamplingParams
from layertap.selection import Selection, parse_tokens

logger = logging.getLogger("layertap")

OnError = Literal["raise", "return"]
Done = queue.SimpleQueue[tuple[int, RequestOutput]]
"""Prompts' numbers with their outputs, as they come."""
# Steps' worth of prompts that wait in the engine, so that it never idles for want of the next one.
_STEPS_AHEAD = 8


class LLM:
    """A language model that hands out its hidden states.

    Args:
        model: Hugging Face id, local folder, ``.gguf`` file, or ``smollm2``.
        layers: boundaries to tap: ids, ``"all"``, ``"eagle3"``, ``"norm"`` (see :mod:`layertap.layers`).
        speculative_config: vLLM's way to say the same.
        kv_transfer_config: the connector that carries states out, as in vLLM; None keeps them in memory.
        engine: ``"torch"``, the embedded engine, or ``"vllm"``.
        kwargs: fields of :class:`layertap.config.EngineConfig` (or, with ``engine="vllm"``, vLLM's own).

    Raises:
        InvalidInputError: an argument is wrong; the message names it, its value and what is allowed.
        UnsupportedModelError: the model cannot be run with a result that is known to be right.
    """

    _engine: ClassVar[str] = "torch"

    def __new__(cls, *args: Any, engine: str = "torch", **kwargs: Any) -> LLM:
        if engine == "vllm" and cls is LLM:
            if importlib.util.find_spec("vllm") is None:
                raise InvalidInputError(
                    "engine", engine, "'torch' here, as vLLM is not installed (pip install 'layertap[vllm]')"
                )
            from layertap.vllm.llm import VllmLLM

            return object.__new__(VllmLLM)
        return object.__new__(cls)

    def __init__(
        self,
        model: str,
        *,
        layers: LayerSpec | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        kv_transfer_config: Mapping[str, Any] | KVTransferConfig | None = None,
        engine: str = "torch",
        **kwargs: Any,
    ) -> None:
        check_engine_name(engine)
        assert engine == self._engine, "a class of its own runs vLLM: LLM(engine='vllm') makes one"
        field = "layers"
        if speculative_config is not None:
            if layers is not None:
                raise InvalidInputError(
                    "layers", layers, "None together with speculative_config, which names them"
                )
            layers, field = layers_of_speculative_config(speculative_config), SPECULATIVE_LAYERS
        transfer = kv_transfer_config
        if transfer is not None and not isinstance(transfer, KVTransferConfig):
            transfer = KVTransferConfig.from_dict(transfer)
        if transfer is not None and layers is None:
            raise InvalidInputError(
                "kv_transfer_config", transfer.kv_connector, "None without layers to extract"
            )
        if kwargs.get("data_parallel_size", 1) != 1:
            serve = "layertap serve" if engine == "torch" else f"layertap serve --engine {engine}"
            raise InvalidInputError(
                "data_parallel_size", kwargs["data_parallel_size"], f"1 here; '{serve}' starts replicas"
            )
        self._prefix = uuid.uuid4().hex[:8]
        self._counter = itertools.count()
        self._start(model, layers, field, transfer, kwargs)

    def _start(
        self,
        model: str,
        layers: LayerSpec | None,
        field: str,
        transfer: KVTransferConfig | None,
        kwargs: dict[str, Any],
    ) -> None:
        """Start the engine with arguments of which each is right on its own.

        Args:
            field: where the user wrote ``layers``.
        """
        self.config = EngineConfig.from_kwargs(model, {**kwargs, "layers": layers})
        self._core = EngineCore(self.config, transfer)
        self._loop = EngineLoop(self._core)
        self._close = weakref.finalize(self, self._loop.close)
        self.prompt_tokenizer = PromptTokenizer(self._core.tokenizer)

    # --- vLLM's calls --------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        request_ids: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Run prompts to the end and return their outputs in order, each with its ``kv_transfer_params``.

        Args:
            prompts: one or many strings, lists of token ids, ``{"prompt_token_ids": [...]}`` or chat
            messages.
            sampling_params: one for all, or one for each.
            use_tqdm: show a progress bar on the terminal.
            request_ids: names for the requests; a file sink names its files after them.
            on_error: what to do when states could not be stored: ``"raise"`` the first
                :class:`~layertap.errors.ExtractionError` after everything has run (its ``outputs`` holds all
                outputs), or ``"return"`` outputs whose ``error`` is set.

        Raises:
            InvalidInputError: a prompt or parameter is wrong; nothing has been run then.
        """
        items = as_list(prompts)
        params = self._params_for(sampling_params, len(items))
        if request_ids is not None and len(request_ids) != len(items):
            raise InvalidInputError(
                "request_ids", f"{len(request_ids)} ids", f"one for each of {len(items)} prompts"
            )
        if on_error not in ("raise", "return"):
            raise InvalidInputError("on_error", on_error, "'raise' or 'return'")
        with standing_heap() as note:
            note(len(items))
            finished = self._generate(items, params, request_ids, use_tqdm)
        failed = [o for o in finished if o.error is not None]
        if failed and on_error == "raise":
            error = failed[0].error
            assert error is not None
            reason = error.reason + (
                f" ({len(failed)} of {len(items)} requests failed)" if len(failed) > 1 else ""
            )
            raised = ExtractionError(error.request_id, reason, error.kind)
            raised.outputs = finished
            raise raised from error
        return finished

    def _generate(
        self,
        items: Sequence[Any],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """The outputs of prompts, in order, whatever became of them."""
        done: Done = queue.SimpleQueue()
        outputs: list[RequestOutput | None] = [None] * len(items)
        running: dict[int, OutputCollector] = {}
        with Progress(len(items), shown=use_tqdm) as progress:
            try:
                collectors = self._checked(items, params, request_ids, done)
                at_once = self._computed_while_checking()
                submit_checked(collectors, len(items), self._submit, running, at_once)
                for _ in items:
                    index, output = done.get()
                    outputs[index] = output
                    del running[index]
                    progress.advance(len(output.prompt_token_ids))
            except BaseException:
                self._abort(running.values())
                raise
        return [o for o in outputs if o is not None]

    def _checked(
        self,
        items: Sequence[Any],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None,
        done: Done,
    ) -> Iterator[OutputCollector]:
        """Collectors of prompts, each of which is checked when it is asked for."""
        prompts = self.prompt_tokenizer.several(items)
        for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            name = request_ids[i] if request_ids is not None else self._next_id()
            try:
                collector = self._collector(name, prompt, p, i, done)
            except InvalidInputError as error:
                if len(items) == 1 or error.field != "prompt":
                    raise
                raise of_prompt(error, i) from None
            yield collector

    def _computed_while_checking(self) -> float:
        """From so many tokens on, those of a call are computed while later ones are checked: enough for two
        steps, so that the first is a full one."""
        budget = self.config.max_num_batched_tokens
        assert budget is not None
        return 2 * budget if self._core.device.type == "cuda" else float("inf")

    def generate_as_completed(
        self,
        requests: Iterable[tuple[str, Any]],
        sampling_params: SamplingParams | None = None,
    ) -> Generator[tuple[str, RequestOutput | InvalidInputError], None, None]:
        """Yield outputs in the order in which they are ready, for any number of prompts in bounded memory.
        Closing the generator gives up what runs.

        Args:
            requests: pairs of a request id and a prompt; read only as far ahead as keeps the engine busy.
            sampling_params: for all of them.

        Yields:
            The request id with its output (whose ``error`` is set if its states could not be stored), or with
            the error of a prompt that was refused.
        """
        with standing_heap() as note:
            yield from self._generate_as_completed(requests, sampling_params or SamplingParams(), note)

    def _generate_as_completed(
        self, requests: Iterable[tuple[str, Any]], params: SamplingParams, note: Callable[[int], None]
    ) -> Iterator[tuple[str, RequestOutput | InvalidInputError]]:
        done: Done = queue.SimpleQueue()
        running: dict[int, OutputCollector] = {}
        most_tokens = _STEPS_AHEAD * (self.config.max_num_batched_tokens or 0)
        tokens = 0
        source = enumerate(requests)
        exhausted = False
        try:
            while running or not exhausted:
                while not exhausted and (
                    not running or (len(running) < 2 * self.config.max_num_seqs and tokens < most_tokens)
                ):
                    item = next(source, None)
                    if item is None:
                        exhausted = True
                        break
                    index, (name, prompt) = item
                    note(index + 1)
                    try:
                        tokenized = self.prompt_tokenizer(prompt, "prompt")
                        collector = self._collector(name, tokenized, params, index, done)
                    except InvalidInputError as error:
                        yield name, error
                        continue
                    self._submit(collector)
                    running[index] = collector
                    tokens += len(tokenized.token_ids)
                if running:
                    index, output = done.get()
                    tokens -= len(running.pop(index).prompt.token_ids)
                    yield output.request_id, output
        finally:
            self._abort(running.values())

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Like :meth:`generate`, for one conversation or a list of them, rendered with the model's chat
        template."""
        items = [messages] if is_single(messages) else list(messages)
        rendered = [self.prompt_tokenizer.chat(m, **template) for m in items]
        return self.generate(rendered, sampling_params, use_tqdm=use_tqdm)

    # --- ours ----------------------------------------------------------------------------------------------

    def extract(
        self,
        prompts: Any,
        *,
        layers: LayerSpec | None = None,
        tokens: Any = "all",
        dtype: str | torch.dtype = "auto",
        max_tokens: int = 0,
        include_output_tokens: bool = False,
        sampling_params: SamplingParams | None = None,
        request_ids: Iterable[str] | None = None,
        on_error: OnError = "raise",
        use_tqdm: bool = False,
        buffer_bytes: int | None = None,
    ) -> Iterator[HiddenStates]:
        """Yield each prompt's hidden states, in the order of the prompts, while later prompts still run.

        Args:
            prompts: one or many, or an iterator: it is read only as far ahead as the buffer allows.
            layers: a subset of the tapped layers, in the order wanted; None takes all.
            tokens: ``"all"``, ``"last"``, a ``slice``, ``{"start": a, "end": b}`` or a list of positions.
            dtype: storage dtype, as a name or PyTorch's; ``"auto"`` is the model's.
            max_tokens: also generate this many tokens.
            include_output_tokens: deliver the generated tokens' states too.
            sampling_params: how to generate; replaces ``max_tokens``.
            request_ids: a name for each prompt.
            on_error: ``"raise"`` ends the iteration at a prompt that failed; ``"return"`` yields its
                :class:`~layertap.errors.ExtractionError` in its place. A prompt that is wrong input is such a
                failure too.
            use_tqdm: show a progress bar on the terminal.
            buffer_bytes: most bytes of states under way or waiting to be taken; None: three steps' worth, at
                least 256 MiB.

        Yields:
            ``HiddenStates`` with ``token_ids`` [T] int64 and ``hidden_states`` [T, L, H].

        Raises:
            InvalidInputError: an argument is wrong; told by the call itself, before anything is computed.
                So are prompts in a list or tuple of at most 10,000 that are none of the allowed forms, or
                have too many token ids, or not the positions in ``tokens``. What takes a tokenizer or a
                look at each id (a text that is too long, an id beyond the vocabulary) is told when the
                prompt's turn comes, as is everything about longer lists and iterators: the error names
                the prompt by its place, and the states of all prompts before it have been yielded. With
                ``on_error="return"`` nothing about a prompt is raised.
            ExtractionError: a prompt's states could not be delivered; told in the same way.
        """
        if self._core.served is None:
            raise InvalidInputError(
                "layers", None, "an LLM that was made with layers=... or speculative_config=..."
            )
        if on_error not in ("raise", "return"):
            raise InvalidInputError("on_error", on_error, "'raise' or 'return'")
        transfer = {
            "layers": _listed(layers),
            "tokens": _listed(tokens),
            "dtype": str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype,
            "include_output_tokens": include_output_tokens,
        }
        if isinstance(tokens, slice):
            parse_tokens(tokens, "tokens")
            transfer["tokens"] = {"start": tokens.start, "end": tokens.stop}
        # Wrong input is told before the first prompt is taken.
        selection = Selection.parse(transfer, self._core.served, prefix="")
        params = sampling_params or SamplingParams(max_tokens=max_tokens, temperature=0.0, detokenize=False)
        params = SamplingParams(**{**_fields(params), "kv_transfer_params": transfer})
        items = as_iterable(prompts)
        if on_error == "raise" and is_checked_ahead(items):
            check_ahead(self, items, params, selection)
        return self._extract(iter(items), params, request_ids, on_error, use_tqdm, buffer_bytes)

    def _extract(
        self,
        prompts: Iterator[Any],
        params: SamplingParams,
        request_ids: Iterable[str] | None,
        on_error: OnError,
        use_tqdm: bool,
        buffer_bytes: int | None,
    ) -> Iterator[HiddenStates]:
        per_token = self._bytes_per_token(params)
        steps = 3 * (self.config.max_num_batched_tokens or 0) * per_token
        names = iter(request_ids) if request_ids is not None else None
        buffer_bytes = buffer_bytes or max(LEAST_BUFFER_BYTES, steps)
        extraction = Extraction(self, prompts, params, names, on_error, per_token, buffer_bytes)
        return extraction.run(use_tqdm)

    def _bytes_per_token(self, params: SamplingParams) -> int:
        served = self._core.served
        assert served is not None
        return len(served.ids) * self._core.verifier.hidden_size * self._core.verifier.dtype.itemsize

    # --- life ----------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None with ``skip_tokenizer_init``."""
        return self._core.tokenizer

    @property
    def served_layers(self) -> ServedLayers | None:
        """The tapped layers; None if this LLM taps none."""
        return self._core.served

    def storage_dtype(self, dtype: str = "auto") -> torch.dtype:
        """What a selection's ``dtype`` means for this model: ``"auto"`` is the model's own."""
        found = self._core.verifier.dtype if dtype == "auto" else getattr(torch, dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def num_hidden_layers(self) -> int:
        return self._core.verifier.num_hidden_layers

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._core.max_model_len

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the engine: running and waiting requests, prefix hits, blocks, stored
        bytes."""
        result = self._loop.call(self._core.stats)
        assert isinstance(result, dict)
        return result

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep what they have."""
        self._loop.call(self._core.pool.reset_prefix_cache)

    def close(self) -> None:
        """End every thread that this object started, and drop the model. Requests that run are aborted."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- inside --------------------------------------------------------------------------------------------

    def _next_id(self) -> str:
        return f"{self._prefix}-{next(self._counter)}"

    def _collector(
        self,
        name: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        index: int,
        done: Done,
    ) -> OutputCollector:
        self._loop.check()
        return OutputCollector(self._core, name, prompt, params, partial(_hand_over, done, index))

    def _check_length(self, num_tokens: int, params: SamplingParams, selection: Selection) -> None:
        """Refuse a prompt of ``LLM.extract`` by its number of tokens."""
        self._core.check_length(num_tokens, params)
        selection.check_length(num_tokens)

    def _submit(self, collector: OutputCollector) -> None:
        for request in collector.requests:
            self._loop.submit(request)

    def _abort(self, collectors: Iterable[OutputCollector]) -> None:
        for collector in collectors:
            for request in collector.requests:
                self._loop.abort(request)

    @staticmethod
    def _params_for(
        given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if given is None:
            return [SamplingParams()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or len(given) != count:
            raise InvalidInputError(
                "sampling_params", given, f"one SamplingParams, or one for each of {count} prompts"
            )
        return given


def _listed(values: Any) -> Any:
    """Arrays, tensors and tuples as lists."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, tuple) else values


def _hand_over(done: Done, index: int, output: RequestOutput) -> None:
    done.put((index, output))


def _fields(params: SamplingParams) -> dict[str, Any]:
    import dataclasses

    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.init}
    values["extra_args"] = None
    return values
