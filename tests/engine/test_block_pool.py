"""The block pool against a model of it: no block is lost, shared by mistake, or found with other contents."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layertap.engine.block_pool import BlockPool

NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[list[int]] = []
        self.contents: dict[int, bytes] = {}
        self.next_hash = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            return
        assert blocks is not None
        assert len(set(blocks)) == count
        for b in blocks:
            assert self.pool.ref_count(b) == 1
            self.contents.pop(b, None)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        block = data.draw(st.sampled_from(blocks))
        if block not in self.contents:
            self.next_hash += 1
            self.contents[block] = b"%d" % self.next_hash
            self.pool.register(block, self.contents[block])

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def find_and_acquire(self, data: st.DataObject) -> None:
        block, content = data.draw(st.sampled_from(sorted(self.contents.items())))
        found = self.pool.find([content, b"never"])
        assert found == [block]
        self.pool.acquire(found)
        self.held.append(found)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(index))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.forget(blocks)
        for b in blocks:
            content = self.contents.pop(b, None)
            assert content is None or self.pool.find([content]) == []

    @invariant()
    def counts_are_right(self) -> None:
        used = {b for blocks in self.held for b in blocks}
        assert self.pool.num_free == NUM_BLOCKS - len(used)
        for b in range(NUM_BLOCKS):
            assert self.pool.ref_count(b) == sum(blocks.count(b) for blocks in self.held)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_freed_block_is_reused_first_and_unknown_ones_before_known() -> None:
    pool = BlockPool(3)
    a, b, c = pool.allocate(3) or []
    pool.register(a, b"a")
    pool.register(c, b"c")
    pool.release([a])
    pool.release([c])
    pool.release([b])
    assert pool.allocate(3) == [b, a, c]


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    (block,) = pool.allocate(1) or []
    pool.register(block, b"x")
    assert pool.find([b"x"]) == []
