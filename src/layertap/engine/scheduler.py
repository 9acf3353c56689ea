"""Which tokens of which requests the next step computes: first come, first served, with chunked prefill."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

from layertap.engine.block_pool import BlockPool
from layertap.engine.request import Request, RequestStatus

_END = 4  # this part of a step is filled with prompts that are chosen for it
_CHOICE = 64  # among so many
_LITTLE = 256  # one token in so many may be left


@dataclass(slots=True)
class ScheduledRequest:
    """Tokens ``start..start+num_tokens`` of a request. The last token's logits are wanted if ``samples``."""

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class SchedulerOutput:
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class Scheduler:
    """Keeps the waiting and the running requests and gives each its blocks.

    All blocks of a prompt are taken when it is admitted, so a prefill that has begun is never interrupted for
    want of memory. Only growth by generated tokens can run out; then the request that came last gives its
    blocks back and is computed again later (its full blocks are usually found in the prefix cache).
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        whole_sequences: bool = False,
        avoid_splitting: bool = False,
        last_in_two: bool = False,
        fill_with_whole: bool = False,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.whole_sequences = whole_sequences
        """The model runs sequence by sequence: no chunks, and a prompt may exceed the token budget."""
        self.avoid_splitting = avoid_splitting
        """Leave the rest of a step empty rather than cut a prompt that fits into a step of its own: where a
        step need not be full to be efficient (a CPU), a cut costs more than it saves."""
        self.last_in_two = last_in_two
        """Compute what is left in two steps where one would take it all: the first one's records are stored
        while the GPU computes the second, and fewer are left to store when it is done."""
        self.fill_with_whole = fill_with_whole
        """Fill the end of a step with waiting prompts that fit exactly, if there are such, rather than with
        the beginning of one. The first that waits is passed over only if it does not fit, and only once."""
        self._passed_over: Request | None = None
        self.more_to_come = False
        """What is here is not all that is left, for certain."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def has_full_step(self) -> bool:
        """Whether the next step, without what may still arrive, has as many tokens or sequences as a step can
        have. Tokens that a prefix cache may hold count."""
        room = self.max_num_seqs - len(self.running)
        return self._tokens_left(room) >= self.max_num_batched_tokens or len(self.waiting) >= room

    def _tokens_left(self, most_waiting: int | None = None) -> int:
        """Tokens that are still to be computed, those that a prefix cache may hold among them. Beyond what a
        step can have they are not counted."""
        tokens = sum(r.num_tokens - r.num_computed_tokens for r in self.running)
        for request in itertools.islice(self.waiting, most_waiting):
            if tokens > self.max_num_batched_tokens:
                break
            tokens += request.num_tokens
        return tokens

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Pick the next step's tokens and allocate their blocks. An empty result means: nothing can run
        now."""
        out = SchedulerOutput()
        budget = self.max_num_batched_tokens
        spare = budget - self._enough()
        index = 0
        while index < len(self.running) and budget > spare:
            request = self.running[index]
            rest = request.num_tokens - request.num_computed_tokens
            if rest <= 0:
                index += 1
                continue
            count = self._count(rest, budget, out)
            if count == 0:
                break
            if not self._grow(request, request.num_computed_tokens + count, out):
                break
            budget -= self._schedule(request, count, out)
            index += 1
        if not out.preempted:
            self._admit(budget, spare, out)
        return out

    def _enough(self) -> int:
        """From so many tokens on, no other request joins the next step."""
        most = self.max_num_batched_tokens
        if not self.last_in_two or self.more_to_come:
            return most
        if any(request.output_token_ids for request in self.running):
            return most  # whoever generates gets a token in each step
        left = self._tokens_left()
        return -(-left // 2) if most // 2 < left <= most else most

    def _count(self, rest: int, budget: int, out: SchedulerOutput) -> int:
        if not self.whole_sequences:
            return min(rest, budget)
        return rest if rest <= budget or not out.scheduled else 0

    def _schedule(self, request: Request, count: int, out: SchedulerOutput) -> int:
        start = request.num_computed_tokens
        end = start + count
        samples = end == request.num_tokens and len(request.output_token_ids) < request.max_tokens
        out.scheduled.append(ScheduledRequest(request, start, count, samples))
        request.num_computed_tokens = end
        if self.pool.enable_prefix_caching:
            # Known from now on: a step writes all keys, values and states of a layer before it reads any.
            hashes = request.hashes(self.block_size)
            full = end // self.block_size
            for i in range(request.num_hashed_blocks, full):
                self.pool.register(request.block_ids[i], hashes[i])
            request.num_hashed_blocks = max(request.num_hashed_blocks, full)
        return count

    def _grow(self, request: Request, num_tokens: int, out: SchedulerOutput) -> bool:
        """Give ``request`` the blocks for its first ``num_tokens`` tokens, if need be at the cost of later
        requests."""
        missing = -(-num_tokens // self.block_size) - len(request.block_ids)
        while missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is not None:
                request.block_ids.extend(blocks)
                break
            victim = self.running.pop()
            self._preempt(victim)
            out.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_hashed_blocks = 0
        request.model_state = None
        request.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def _admit(self, budget: int, spare: int, out: SchedulerOutput) -> None:
        while self.waiting and budget > spare and len(self.running) < self.max_num_seqs:
            if self.fill_with_whole and self._end_with_whole(budget, out):
                return
            used = self._admit_one(0, budget, out)
            if used is None:
                return
            budget -= used

    def _admit_one(self, index: int, budget: int, out: SchedulerOutput) -> int | None:
        """Admit one of those that wait. Returns its tokens in this step; None if it has to wait longer."""
        request = self.waiting[index]
        num_tokens = request.num_tokens
        reuse: list[int] = []
        # The last token is always computed: it must yield a logit.
        if self.pool.enable_prefix_caching and request.params.prompt_logprobs is None:
            usable = (num_tokens - 1) // self.block_size
            reuse = self.pool.find(request.hashes(self.block_size)[:usable])
        cached = len(reuse) * self.block_size
        rest = num_tokens - cached
        count = self._count(rest, budget, out)
        if count == 0:
            return None
        if self.avoid_splitting and count < rest <= self.max_num_batched_tokens and out.scheduled:
            return None
        fresh = -(-num_tokens // self.block_size) - len(reuse)
        if self.pool.num_free_after(reuse) < fresh:
            return None
        del self.waiting[index]
        self._has_had_its_turn(request)
        self.pool.acquire(reuse)
        blocks = self.pool.allocate(fresh)
        assert blocks is not None
        request.block_ids = reuse + blocks
        request.num_computed_tokens = cached
        request.num_hashed_blocks = len(reuse)
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = cached
            request.metrics.first_scheduled = time.monotonic()
            self.prefix_queries += num_tokens
            self.prefix_hits += cached
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return self._schedule(request, count, out)

    def _end_with_whole(self, budget: int, out: SchedulerOutput) -> bool:
        """Admit prompts that fill what is left of a step, or all but a little, and end it with them. False if
        there are none, or it is too early to choose."""
        first = self.waiting[0]
        if first is self._passed_over or first.num_tokens > self.max_num_batched_tokens:
            return False  # it is its turn, or it is cut anyway
        if budget > self.max_num_batched_tokens // _END and first.num_tokens <= budget:
            return False
        room = self.max_num_seqs - len(self.running)
        lengths = [request.num_tokens for request in itertools.islice(self.waiting, _CHOICE)]
        little = self.max_num_batched_tokens // _LITTLE
        if sum(lengths) < budget - little:
            return False
        chosen = _fitting(lengths, budget, room)
        left = budget - sum(lengths[i] for i in chosen)
        if not chosen or left > little:
            return False
        if chosen[0] != 0:
            self._passed_over = first
        for gone, i in enumerate(chosen):
            used = self._admit_one(i - gone, budget, out)
            if used is None:
                break  # no memory: what fits is computed
            budget -= used
        return True

    def remove(self, request: Request) -> None:
        """Take a request out of its queue. Its blocks stay: see :meth:`free`."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            self.waiting.remove(request)
            self._has_had_its_turn(request)

    def _has_had_its_turn(self, request: Request) -> None:
        if request is self._passed_over:
            self._passed_over = None

    def free(self, request: Request) -> None:
        """Give a request's blocks back."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_hashed_blocks = 0

    def forget_unfilled(self, out: SchedulerOutput) -> None:
        """A step failed: the blocks it should have filled must not be found by anyone."""
        for s in out.scheduled:
            first = s.start // self.block_size
            self.pool.forget(s.request.block_ids[first:])


def _fitting(lengths: list[int], room: int, most: int) -> list[int]:
    """Which lengths come closest to a room from below, the earlier ones of several choices, the first among
    them if it fits. The indices, in order.

    Args:
        most: of them, at most.
    """
    if not lengths or most <= 0:
        return []
    first = [0] if lengths[0] <= room else []
    room -= sum(lengths[i] for i in first)
    inside = (1 << room + 1) - 1
    reached = [1]  # bit n of entry i: some of the lengths before i + 1 sum up to n
    for length in lengths[1:]:
        sums = reached[-1]
        reached.append((sums | sums << length) & inside)
    total = reached[-1].bit_length() - 1
    chosen = []
    for i in range(len(lengths) - 1, 0, -1):
        if not reached[i - 1] >> total & 1:  # not without this one
            chosen.append(i)
            total -= lengths[i]
    return [*first, *reversed(chosen)][:most]
