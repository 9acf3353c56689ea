"""The scheduler, driven by random arrivals, aborts and slow connectors: every token once, no block lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.engine.block_pool import BlockPool
from layertap.engine.request import Request, RequestStatus
from layertap.engine.scheduler import Scheduler
from layertap.outputs import RequestMetrics
from layertap.prompts import TokenizedPrompt
from layertap.sampling_params import SamplingParams

BLOCK = 4


def make_request(name: str, length: int, max_tokens: int, rng: random.Random) -> Request:
    ids = [rng.randrange(3) for _ in range(length)]  # few token ids: prefixes are often shared
    prompt = TokenizedPrompt.of(None, ids)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, prompt, params, None, frozenset(), RequestMetrics(0.0), max_tokens)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(8, 40),
    budget=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    whole=st.booleans(),
    caching=st.booleans(),
    avoid_splitting=st.booleans(),
    last_in_two=st.booleans(),
)
def test_every_request_is_computed_whole_and_every_block_returns(
    seed: int,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    whole: bool,
    caching: bool,
    avoid_splitting: bool,
    last_in_two: bool,
) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, caching and not whole)
    scheduler = Scheduler(pool, BLOCK, budget, max_num_seqs, whole, avoid_splitting, last_in_two)
    longest = num_blocks * BLOCK
    todo = []
    for i in range(12):
        length = rng.randint(1, longest - 6)
        todo.append(make_request(str(i), length, rng.randint(0, 6), rng))
    everything = list(todo)
    contents: dict[int, tuple[int, ...]] = {}
    pinned: list[Request] = []
    for _ in range(20000):
        if todo and rng.random() < 0.3:
            scheduler.add(todo.pop())
        if pinned and rng.random() < 0.5:
            scheduler.free(pinned.pop(rng.randrange(len(pinned))))  # the connector has copied this one
        live = [*scheduler.running, *scheduler.waiting]
        if live and rng.random() < 0.02:
            victim = rng.choice(live)
            scheduler.remove(victim)
            victim.status = RequestStatus.ABORTED
            scheduler.free(victim)
        out = scheduler.schedule()
        tokens = out.total_num_scheduled_tokens
        assert tokens <= budget or (whole and len(out.scheduled) == 1)
        assert len(scheduler.running) <= max_num_seqs
        for (
            s
        ) in out.scheduled:  # "run" the step: write every scheduled token, then check what must be readable
            ids = [*s.request.prompt_token_ids, *s.request.output_token_ids]
            for p in range(s.start, s.start + s.num_tokens):
                contents[s.request.block_ids[p // BLOCK] * BLOCK + p % BLOCK] = tuple(ids[: p + 1])
        for s in out.scheduled:
            ids = [*s.request.prompt_token_ids, *s.request.output_token_ids]
            for p in range(s.start + s.num_tokens):
                slot = s.request.block_ids[p // BLOCK] * BLOCK + p % BLOCK
                assert contents[slot] == tuple(ids[: p + 1]), "a slot holds another sequence's token"
        for s in out.scheduled:
            request = s.request
            if s.samples:
                request.output_token_ids.append(rng.randrange(3))
            if request.num_computed_tokens >= request.num_prompt_tokens and (
                len(request.output_token_ids) >= request.max_tokens
            ):
                scheduler.running.remove(request)
                request.status = RequestStatus.LENGTH
                pinned.append(request)
        if not todo and not scheduler.has_requests:
            break
    else:
        pytest.fail("requests were never finished")
    for request in pinned:
        scheduler.free(request)
    assert pool.num_free == num_blocks
    assert all(r.status.finished for r in everything)


def test_the_last_prompt_token_is_computed_even_if_all_blocks_are_known() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(16), BLOCK, 64, 4)
    first = make_request("a", 8, 0, rng)
    scheduler.add(first)
    scheduler.schedule()
    again = make_request("b", 8, 0, rng)
    again.prompt = first.prompt
    scheduler.add(again)
    (scheduled,) = scheduler.schedule().scheduled
    assert (scheduled.start, scheduled.num_tokens) == (4, 4)


def test_a_prompt_that_fits_a_step_is_not_cut_where_that_is_to_be_avoided() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(64), BLOCK, 40, 4, avoid_splitting=True)
    for name, length in (("a", 30), ("b", 25), ("c", 90)):
        scheduler.add(make_request(name, length, 0, rng))
    steps = [[s.num_tokens for s in scheduler.schedule().scheduled] for _ in range(4)]
    assert steps == [[30], [25, 15], [40], [35]]


def test_a_salt_keeps_equal_prompts_apart() -> None:
    rng = random.Random(0)
    a, b = make_request("a", 9, 0, rng), make_request("b", 9, 0, rng)
    b.prompt, b.cache_salt = a.prompt, b"adapter"
    assert set(a.hashes(BLOCK)).isdisjoint(b.hashes(BLOCK))


def test_a_failed_step_leaves_nothing_to_be_found() -> None:
    rng = random.Random(0)
    pool = BlockPool(16)
    scheduler = Scheduler(pool, BLOCK, 64, 4)
    request = make_request("a", 12, 0, rng)
    scheduler.add(request)
    out = scheduler.schedule()
    scheduler.forget_unfilled(out)
    assert pool.find(request.hashes(BLOCK)) == []


def test_a_step_is_full_by_tokens_or_by_sequences() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(100, False), BLOCK, 16, 3)
    assert not scheduler.has_full_step
    scheduler.add(make_request("a", 10, 1, rng))
    assert not scheduler.has_full_step
    scheduler.add(make_request("b", 7, 1, rng))
    assert scheduler.has_full_step, "17 tokens for 16"
    assert scheduler.schedule().total_num_scheduled_tokens == 16
    assert not scheduler.has_full_step, "one token of b is left"
    scheduler.add(make_request("c", 2, 1, rng))
    assert scheduler.has_full_step, "three sequences are as many as may run"


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ([4, 4, 4, 4], [[4, 4], [4, 4]]),
        ([4, 4, 4, 4, 4, 4, 4], [[4, 4, 4, 4], [4, 4], [4]]),  # a full step, then what is left
        ([3, 10, 3], [[3, 10], [3]]),  # no prompt is cut for it
        ([16], [[16]]),
        ([20, 4, 4], [[16], [4, 4], [4]]),
        ([3, 4], [[3, 4]]),  # not worth a step more
    ],
)
def test_what_is_left_is_computed_in_two_steps(lengths: list[int], steps: list[list[int]]) -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(100, False), BLOCK, 16, 8, last_in_two=True)
    for i, length in enumerate(lengths):
        scheduler.add(make_request(str(i), length, 0, rng))
    seen = []
    while scheduler.has_requests:
        seen.append([s.num_tokens for s in scheduler.schedule().scheduled])
        scheduler.running = [r for r in scheduler.running if r.num_computed_tokens < r.num_tokens]
    assert seen == steps


def test_what_is_not_all_is_not_computed_in_two_steps() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(100, False), BLOCK, 16, 8, last_in_two=True)
    scheduler.more_to_come = True
    for i in range(4):
        scheduler.add(make_request(str(i), 4, 0, rng))
    assert len(scheduler.schedule().scheduled) == 4
