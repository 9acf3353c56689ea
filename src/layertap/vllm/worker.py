"""The worker's half: from vLLM's cache through the producer to files, with their locks.

Exactly one worker writes: the one of tensor-parallel rank 0 that holds the cache (under pipeline
parallelism the last stage). All ranks hold the same states.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from layertap.connectors.file import file_sink
from layertap.connectors.job import Completion, Job
from layertap.connectors.producer import Producer
from layertap.errors import ExtractionError, InvalidInputError
from layertap.vllm.plan import CachePlan
from layertap.vllm.publication import Publication

_REMEMBERED_STEPS = 16
_PAUSE = 0.5  # seconds between looks at whether to end; news wakes the watcher at once


@dataclass(frozen=True, slots=True)
class Save:
    """A request that has ended with its whole prompt computed."""

    request_id: str
    """vLLM's; the job's is the record's name."""
    job: Job
    path: str
    last_step: int
    """The last step that computes some of its states."""


class CacheWriter:
    """Takes saves, tells which blocks are free, and publishes.

    A thread of its own waits for the producer's news: files must be published also while vLLM has no step
    to run.

    Args:
        cache: [num_blocks, block_size, C, H], a view of vLLM's cache.
        options: the connector's checked options.
    """

    def __init__(self, cache: torch.Tensor, plan: CachePlan, options: Mapping[str, Any]) -> None:
        self.publication = Publication(options["use_synchronization_lock"])
        self._sink = file_sink(options, cache.is_cuda)
        self.producer = Producer(
            cache,
            self._sink,
            model=plan.model,
            layers=plan.layers,
            chunk_bytes=options["staging_chunk_bytes"],
            ring_bytes=options["staging_ring_bytes"],
            num_writers=options["num_writer_threads"],
        )
        self._saves: dict[str, Save] = {}  # by the record's name
        self._copied: set[str] = set()
        self._device = cache.device
        self._begun: dict[int, Any] = {}
        """On a GPU, for the latest steps an event behind all that was queued before the step began."""
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="layertap-publisher", daemon=True)
        self._watcher.start()

    def begin_step(self, step: int) -> None:
        """A step that is not launched yet, or only now: what was launched before it is in steps before."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._begun[step] = event
            self._begun.pop(step - _REMEMBERED_STEPS, None)

    def begin(self, paths: Iterable[str]) -> None:
        """Requests that have their first step."""
        self.publication.begin(*paths)

    def save(self, saves: Iterable[Save]) -> None:
        """Queue ended requests, together. Their blocks stay as they are until :meth:`take_copied` names
        them."""
        taken: list[Save] = []
        for save in saves:
            name = save.job.request_id
            try:
                self.producer.check(save.job.selection.columns)
                with self._guard:
                    if name in self._saves:
                        raise InvalidInputError(
                            "request_id", name, "an id that is not being delivered already"
                        )
                    self._saves[name] = save
            except InvalidInputError as error:
                with self._guard:
                    self._copied.add(save.request_id)
                self.publication.fail(save.path, str(error), "invalid_input")
            else:
                taken.append(save)
        if taken:
            # vLLM may have launched another step before it saw that a request has ended: a copy that waited
            # for all that is queued now would wait for that one.
            self.producer.submit(
                *(replace(save.job, ready=self._begun.get(save.last_step + 1)) for save in taken)
            )

    def refuse(self, path: str, reason: str) -> None:
        """A request whose wish cannot be met."""
        self.publication.fail(path, reason, "invalid_input")

    def drop(self, path: str) -> None:
        """A request that was aborted."""
        self.publication.drop(path)

    def take_copied(self) -> set[str]:
        """Requests whose blocks nobody reads any more, since the last call."""
        with self._guard:
            copied, self._copied = self._copied, set()
        return copied

    def close(self) -> None:
        """Write what was taken on, and release threads, memory and locks."""
        self.producer.close(drain=True)
        self._closing.set()
        self._watcher.join()
        self._note(self.producer.poll())
        self.publication.close()
        self._sink.close()

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._note(self.producer.poll(timeout=_PAUSE))

    def _note(self, news: Iterable[Completion]) -> None:
        published: list[str] = []
        failed: list[tuple[str, ExtractionError]] = []
        with self._guard:
            for item in news:
                save = self._saves[item.request_id]
                if item.kind == "copied":
                    self._copied.add(save.request_id)
                    continue
                del self._saves[item.request_id]
                if item.error is None:
                    published.append(save.path)
                else:
                    failed.append((save.path, item.error))
        self.publication.publish(*published)
        for path, error in failed:
            self.publication.fail(path, error.reason, error.kind)
