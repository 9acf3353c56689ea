"""The scheduler, driven by random arrivals, aborts and slow connectors: every token once, no block lost."""

from __future__ import annotations

import itertools
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.engine.block_pool import BlockPool
from layertap.engine.request import Request, RequestStatus
from layertap.engine.scheduler import Scheduler, _fitting
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
    fill_with_whole=st.booleans(),
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
    fill_with_whole: bool,
) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, caching and not whole)
    scheduler = Scheduler(
        pool, BLOCK, budget, max_num_seqs, whole, avoid_splitting, last_in_two, fill_with_whole
    )
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


@given(lengths=st.lists(st.integers(1, 12), max_size=9), room=st.integers(0, 40), most=st.integers(0, 9))
def test_no_choice_comes_closer(lengths: list[int], room: int, most: int) -> None:
    chosen = _fitting(lengths, room, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= most
    total = sum(lengths[i] for i in chosen)
    assert total <= room
    if lengths and most and lengths[0] <= room:
        assert chosen[0] == 0, "the first goes first"
    if most >= len(lengths):
        sums = [
            sum(subset)
            for n in range(len(lengths) + 1)
            for subset in itertools.combinations(lengths, n)
            if not (lengths and lengths[0] <= room) or subset[:1] == (lengths[0],)
        ]
        assert total == max((x for x in sums if x <= room), default=0)


def steps_of(scheduler: Scheduler, lengths: list[int]) -> list[list[tuple[str, int]]]:
    """Requests and their numbers of tokens, step by step."""
    rng = random.Random(0)
    for i, length in enumerate(lengths):
        scheduler.add(make_request("abcdefghij"[i], length, 0, rng))
    steps = []
    while scheduler.has_requests:
        scheduled = scheduler.schedule().scheduled
        assert scheduled
        steps.append([(s.request.request_id, s.num_tokens) for s in scheduled])
        scheduler.running = [r for r in scheduler.running if r.num_computed_tokens < r.num_tokens]
    return steps


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        # b does not fit behind a, c and d do, exactly
        ([600, 500, 300, 124], [[("a", 600), ("c", 300), ("d", 124)], [("b", 500)]]),
        ([600, 500, 300, 122], [[("a", 600), ("c", 300), ("d", 122)], [("b", 500)]]),  # all but two
        # nothing fits well: the first that waits is begun
        ([600, 500, 300, 60], [[("a", 600), ("b", 424)], [("b", 76), ("c", 300), ("d", 60)]]),
        ([1000, 500, 20, 24], [[("a", 1000), ("d", 24)], [("b", 500), ("c", 20)]]),
        ([900, 500, 100, 24], [[("a", 900), ("c", 100), ("d", 24)], [("b", 500)]]),
        # what is longer than a step is cut anyway
        ([600, 1500, 424], [[("a", 600), ("b", 424)], [("b", 1024)], [("b", 52), ("c", 424)]]),
        (
            [24, 2000, 500, 500],
            [[("a", 24), ("b", 1000)], [("b", 1000), ("c", 24)], [("c", 476), ("d", 500)]],
        ),
    ],
)
def test_a_step_ends_with_prompts_that_fit(lengths: list[int], steps: list[list[tuple[str, int]]]) -> None:
    scheduler = Scheduler(BlockPool(4000, False), BLOCK, 1024, 8, fill_with_whole=True)
    assert steps_of(scheduler, lengths) == steps


def test_nobody_is_passed_over_twice() -> None:
    """However many arrive that fit better, also where others generate, so that no step has room for it."""
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(40000, False), BLOCK, 1024, 256, fill_with_whole=True)
    for i in range(100):
        scheduler.add(make_request(f"generates {i}", 4, 10**6, rng))
    scheduler.schedule()
    for request in scheduler.running:
        request.output_token_ids.append(3)
    scheduler.add(make_request("waits", 1000, 0, rng))
    begun = []
    for i in range(3):
        for k in range(20):
            scheduler.add(make_request(f"small {i} {k}", 132, 0, rng))  # seven of them fit exactly
        scheduled = scheduler.schedule().scheduled
        assert sum(s.num_tokens for s in scheduled) > 1000, "full"
        begun.append(any(s.request.request_id == "waits" for s in scheduled))
        for s in scheduled:
            if s.samples:
                s.request.output_token_ids.append(3)
        scheduler.running = [r for r in scheduler.running if r.num_computed_tokens < r.num_tokens]
    assert begun == [False, True, True]


class Name(str):
    """Of which it can be known whether anybody has it still; requests have slots."""


@pytest.mark.parametrize("admitted", [True, False])
def test_who_was_passed_over_is_let_go_of(admitted: bool) -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(4000, False), BLOCK, 1024, 8, fill_with_whole=True)
    for name, length in (("a", 600), ("b", 500), ("c", 300), ("d", 124)):
        scheduler.add(make_request(Name(name), length, 0, rng))
    scheduler.schedule()
    (passed_over,) = scheduler.waiting
    if admitted:
        scheduler.running.clear()
        scheduler.schedule()
        scheduler.running.clear()
    else:
        scheduler.remove(passed_over)
        scheduler.running.clear()
    gone = weakref.ref(passed_over.request_id)
    del passed_over
    assert gone() is None


def test_whoever_generates_gets_a_token_in_each_step() -> None:
    rng = random.Random(0)
    scheduler = Scheduler(BlockPool(9000, False), BLOCK, 256, 256, last_in_two=True)
    for i in range(200):
        scheduler.add(make_request(str(i), 1, 100, rng))
    steps = 0
    while scheduler.has_requests and steps < 300:
        steps += 1
        for s in scheduler.schedule().scheduled:
            assert s.samples
            s.request.output_token_ids.append(3)
        ended = [r for r in scheduler.running if len(r.output_token_ids) == 100]
        for request in ended:
            scheduler.running.remove(request)
    assert steps <= 101
