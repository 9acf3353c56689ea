"""Runs one scheduled step on the verifier: builds the inputs, lets the taps write, returns logits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from layertap.engine.attention import BatchLayout
from layertap.engine.draft import DraftModel
from layertap.engine.recorded_steps import RecordedSteps
from layertap.engine.scheduler import ScheduledRequest
from layertap.engine.self_check import difference, make_layout
from layertap.engine.step_graph import GraphMemory, StepGraph
from layertap.engine.taps import Taps
from layertap.engine.verifier import Verifier
from layertap.layers import ServedLayers

# Primes, that no other size of a model is likely to equal: a graph would take the two for one.
_WARM_UP_TOKENS = (211, 97, 2)
_Int64s = np.ndarray[Any, np.dtype[np.int64]]
_REPLAY_TOLERANCE = 1e-2
_COMPARED_TOKENS = 256
_LARGEST_PRIMES = (65521, 32749, 16381, 8191, 4093, 2039, 1021, 509)


@dataclass(slots=True)
class StepLogits:
    """Logits of one step, for the requests that want some."""

    sampling: list[ScheduledRequest]
    rows: torch.Tensor | None
    """[len(sampling), vocab]"""
    prompt: list[tuple[ScheduledRequest, torch.Tensor]]
    """Requests that want prompt log-probabilities, with the logits [n, vocab] of their tokens of this
    step."""


def _paged(
    block_ids: Sequence[Sequence[int]], lengths: Sequence[int], block_size: int
) -> tuple[_Int64s, _Int64s]:
    """Slots and positions of the first ``lengths[i]`` tokens of every sequence, in order: a few operations
    for all of them, not a few for each."""
    num_blocks = [-(-n // block_size) for n in lengths]
    flat = itertools.chain.from_iterable(ids[:n] for ids, n in zip(block_ids, num_blocks, strict=True))
    blocks = np.fromiter(flat, dtype=np.int64, count=sum(num_blocks))
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    positions = np.arange(len(begins), dtype=np.int64) - begins
    first_block = np.repeat(np.cumsum([0, *num_blocks[:-1]]), lengths)
    slots = blocks[first_block + positions // block_size] * block_size + positions % block_size
    return slots, positions


class ModelRunner:
    """Owns the caches of the verifier and of the draft model, and fills them.

    Args:
        verifier: the model.
        served: tapped layers; None taps nothing.
        num_blocks: blocks that the block pool hands out. One more is allocated for padding tokens.
        prefix_caching: other requests may find what a step has computed.
    """

    def __init__(
        self,
        verifier: Verifier,
        served: ServedLayers | None,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
    ) -> None:
        self.verifier = verifier
        self._prefix_caching = prefix_caching
        self.block_size = block_size
        self.device = verifier.device
        verifier.allocate((num_blocks + 1) * block_size)
        self.draft: DraftModel | None = None
        self._slot_mapping: torch.Tensor | None = None
        self.recorded = RecordedSteps()
        self.least_tokens = 1
        """A smaller step is filled up. Compiled layers want two: for one they are compiled once more."""
        if served is not None:
            self.draft = DraftModel(
                num_blocks + 1,
                block_size,
                len(served.columns),
                verifier.hidden_size,
                verifier.dtype,
                self.device,
            )
            self._taps = Taps(verifier.decoder, verifier.layers, served.columns, self._store)

    def _store(self, column: int, hidden_TH: torch.Tensor) -> None:
        if self._slot_mapping is not None:
            assert self.draft is not None
            self.draft(column, hidden_TH, self._slot_mapping)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, with_logits: bool) -> None:
        """Run steps of a few sizes on the padding block, so that compilation and library set-up happen now.

        Args:
            num_tokens: of a full step. On a GPU a step of about that size comes first: kernels are chosen,
                and measured, for the first size that they see.
        """
        first = [n for n in _LARGEST_PRIMES if n <= num_tokens][:1] if self.device.type == "cuda" else []
        for count in (*first, *_WARM_UP_TOKENS):
            self._run_padding(count, logits=False)
            if with_logits and count not in first:
                self._run_padding(count, logits=True)

    def _run_padding(self, count: int, logits: bool, graph: StepGraph | None = None) -> None:
        """A step of ``count`` tokens that go to the padding block; replayed with a ``graph``, whose tokens it
        takes."""
        longest = min(count, self.verifier.max_model_len)
        lengths = [longest] * (count // longest) + [n for n in (count % longest,) if n]
        slots = np.full(count, self._padding_slot, dtype=np.int64)
        parts = torch.split(self._to_device(slots), lengths)
        layout = make_layout(list(parts), [0] * len(lengths), lengths)
        positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
        ids = np.arange(count, dtype=np.int64) % self.verifier.vocab_size
        last = torch.tensor([count - 1], device=self.device) if logits else None
        self._forward(ids, positions, slots, layout, last, graph)

    def _forward(
        self, ids: _Int64s, positions: _Int64s, slots: _Int64s, layout: BatchLayout,
        rows: torch.Tensor | None, graph: StepGraph | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The verifier's forward, launched or replayed.

        Args:
            slots: [T] those of ``layout.slot_mapping``.
            rows: flat indices whose logits are wanted; None wants none.
        """
        self._slot_mapping = layout.slot_mapping if graph is None else graph.slots_T
        try:
            if graph is None:
                return self.verifier.forward_packed(
                    self._to_device(ids), self._to_device(positions), layout, rows
                )
            graph.fill(ids, positions, slots)
            with graph.replaying(layout):
                return self.verifier.forward_packed(graph.ids_T, graph.positions_T, layout, rows)
        finally:
            self._slot_mapping = None

    @torch.inference_mode()
    def record(self, num_tokens: int) -> None:
        """Record the step of this size, and smaller ones that are worth it; steps of about these sizes are
        replayed from now on.

        Raises:
            RuntimeError: it cannot be recorded, or a replay does not give what the step gives. Those that
                were recorded before stay.
        """
        memory = GraphMemory(self.device)
        self.recorded.token_seconds = self._record(num_tokens, memory) / num_tokens
        self.recorded.launch_seconds = self._launch_seconds()
        for size in self.recorded.smaller_sizes(num_tokens):
            self._record(size, memory)

    def _launch_seconds(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        begun = time.monotonic()
        self._run_padding(_WARM_UP_TOKENS[0], logits=False)
        return time.monotonic() - begun

    def _record(self, num_tokens: int, memory: GraphMemory) -> float:
        """Record one step, and compare a replay. Returns the replay's seconds."""
        outputs: list[torch.Tensor] = []
        apart = max(1, num_tokens // _COMPARED_TOKENS)

        def keep(module: Any, arguments: Any, output: Any) -> None:
            outputs.append(output[0][0, ::apart].clone())

        hook = self.verifier.decoder.register_forward_hook(keep)
        try:
            # Whatever is set up at its first use is set up by this one.
            self._run_padding(num_tokens, logits=False)
            graph = StepGraph(self.verifier, num_tokens, self._padding_slot)
            self._slot_mapping = graph.slots_T
            try:
                graph.record(memory)
            finally:
                self._slot_mapping = None
            begun = time.monotonic()
            self._run_padding(num_tokens, logits=False, graph=graph)
        finally:
            hook.remove()
        d = difference(outputs[1], outputs[0])
        seconds = time.monotonic() - begun
        if not d <= _REPLAY_TOLERANCE:
            raise RuntimeError(f"a replayed step gives another result (relative difference {d:.1e})")
        self.recorded.add(graph)
        return seconds

    @property
    def _padding_slot(self) -> int:
        cache = self.verifier.attention[0].key_cache
        assert cache is not None
        return int(cache.shape[0]) - self.block_size

    def close(self) -> None:
        """Drop the caches."""
        if self.draft is not None:
            self._taps.remove()
            self.draft = None
        self.recorded.clear()

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    @torch.inference_mode()
    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepLogits:
        """Compute one step. Keys, values and hidden states of all its tokens are in the caches afterwards."""
        if self.verifier.packed:
            return self._execute_packed(scheduled)
        return self._execute_alone(scheduled)

    def _execute_packed(self, scheduled: Sequence[ScheduledRequest]) -> StepLogits:
        ids = np.concatenate([s.request.token_array(s.start, s.start + s.num_tokens) for s in scheduled])
        counts = [s.num_tokens for s in scheduled]
        starts = list(itertools.accumulate(counts, initial=0))
        contexts = [s.start for s in scheduled]
        totals = [s.start + s.num_tokens for s in scheduled]
        with_context = any(contexts)
        all_slots, positions = _paged([s.request.block_ids for s in scheduled], totals, self.block_size)
        ends = list(itertools.accumulate(totals, initial=0))
        mapping = all_slots
        if with_context:
            new = positions >= np.repeat(contexts, totals)
            mapping, positions = all_slots[new], positions[new]
        if len(ids) < self.least_tokens:
            # One more sequence of one token, in the padding block.
            ids, positions = np.append(ids, 0), np.append(positions, 0)
            mapping, all_slots = (np.append(x, self._padding_slot) for x in (mapping, all_slots))
            for numbers, one in ((counts, 1), (contexts, 0), (totals, 1)):
                numbers.append(one)
            starts.append(starts[-1] + 1)
            ends.append(ends[-1] + 1)
        graph = self.recorded.pick(len(ids))
        slots_of_all = self._to_device(all_slots) if with_context else None
        cuda = self.device.type == "cuda"
        layout = BatchLayout(
            slot_mapping=graph.slots_T[: len(ids)] if graph is not None else self._to_device(mapping),
            query_starts=starts,
            context_lens=contexts,
            slots=[
                slots_of_all[ends[i] : ends[i + 1]] if context and slots_of_all is not None else None
                for i, context in enumerate(contexts)
            ],
            cu_seqlens_q=self._to_device(np.asarray(starts, dtype=np.int32)) if cuda else None,
            cu_seqlens_k=self._to_device(np.cumsum([0, *totals], dtype=np.int32)) if cuda else None,
            max_seqlen_q=max(counts),
            max_seqlen_k=max(totals),
            all_slots=slots_of_all if cuda else None,
            keep_kv=self._prefix_caching or with_context or any(_goes_on(s) for s in scheduled),
        )
        sampling = [s for s in scheduled if s.samples]
        wanted: list[int] = []
        for i, s in enumerate(scheduled):
            if s.request.params.prompt_logprobs is not None and s.start < s.request.num_prompt_tokens:
                wanted.extend(range(starts[i], starts[i + 1]))
            elif s.samples:
                wanted.append(starts[i + 1] - 1)
        rows = self._to_device(np.asarray(wanted, dtype=np.int64)) if wanted else None
        logits = self._forward(ids, positions, mapping, layout, rows, graph)
        if logits is None:
            return StepLogits([], None, [])
        prompt: list[tuple[ScheduledRequest, torch.Tensor]] = []
        last: list[int] = []
        offset = 0
        for s in scheduled:
            if s.request.params.prompt_logprobs is not None and s.start < s.request.num_prompt_tokens:
                prompt.append((s, logits[offset : offset + s.num_tokens]))
                offset += s.num_tokens
                if s.samples:
                    last.append(offset - 1)
            elif s.samples:
                last.append(offset)
                offset += 1
        if not sampling:
            return StepLogits([], None, prompt)
        return StepLogits(sampling, logits if not prompt else logits[last], prompt)

    def _execute_alone(self, scheduled: Sequence[ScheduledRequest]) -> StepLogits:
        rows: list[torch.Tensor] = []
        sampling: list[ScheduledRequest] = []
        prompt: list[tuple[ScheduledRequest, torch.Tensor]] = []
        for s in scheduled:
            request = s.request
            end = s.start + s.num_tokens
            more = s.samples and len(request.output_token_ids) + 1 < request.max_tokens
            again = s.start > 0 and request.model_state is None
            start = 0 if again else s.start
            wants_all = request.params.prompt_logprobs is not None and s.start < request.num_prompt_tokens
            slots, _ = _paged([request.block_ids], [end], self.block_size)
            self._slot_mapping = torch.from_numpy(slots[start:]).to(self.device)
            try:
                ids = torch.from_numpy(request.token_array(start, end).copy()).to(self.device)
                logits, request.model_state = self.verifier.forward_alone(
                    ids,
                    None if again else request.model_state,
                    start,
                    want_logits=s.samples or wants_all,
                    keep_state=more and self.verifier.incremental,
                    all_logits=wants_all,
                )
            finally:
                self._slot_mapping = None
            if logits is None:
                continue
            if wants_all:
                prompt.append((s, logits))
            if s.samples:
                sampling.append(s)
                rows.append(logits[-1:])
        return StepLogits(sampling, torch.cat(rows) if rows else None, prompt)


def _goes_on(s: ScheduledRequest) -> bool:
    """Whether a later step will compute more of the request."""
    end = s.start + s.num_tokens
    return end < s.request.num_tokens or len(s.request.output_token_ids) + s.samples < s.request.max_tokens
