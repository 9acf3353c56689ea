"""Fixed-size blocks, shared by the KV cache and the hidden-state cache, with reference counts and prefix
reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """Hands out block ids ``0..num_blocks-1``.

    A block with no references stays known by its hash until it is needed for something else; the least
    recently freed one goes first. A prefix hit takes such a block back, with the keys, values and hidden
    states in it.
    """

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict((i, None) for i in range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nothing refers to; those that are still known by hash count too."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        return self._refs[block_id]

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix of ``hashes``."""
        found: list[int] = []
        if self.enable_prefix_caching:
            for h in hashes:
                block = self._block_of.get(h)
                if block is None:
                    break
                found.append(block)
        return found

    def num_free_after(self, taken: Sequence[int]) -> int:
        """Free blocks that would be left if ``taken`` (blocks from :meth:`find`) were acquired."""
        free = len(self._free)
        return free - sum(1 for b in taken if self._refs[b] == 0) if taken else free

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a reference to known blocks."""
        for b in block_ids:
            if self._refs[b] == 0:
                del self._free[b]
            self._refs[b] += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None when there are not that many. Their old hashes
        are forgotten."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for b in taken:
            if self._hash_of[b] is not None:
                self._forget(b)
            self._refs[b] = 1
        return taken

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a block findable. The first block with a hash keeps it."""
        if not self.enable_prefix_caching or block_hash in self._block_of:
            return
        self._forget(block_id)
        self._hash_of[block_id] = block_hash
        self._block_of[block_hash] = block_id

    def forget(self, block_ids: Sequence[int]) -> None:
        """Drop hashes whose blocks were never filled."""
        for b in block_ids:
            self._forget(b)

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference each. Later blocks of a sequence become reusable before earlier ones."""
        for b in reversed(block_ids):
            refs = self._refs[b] - 1
            assert refs >= 0, f"block {b} released too often"
            self._refs[b] = refs
            if refs == 0:
                self._free[b] = None
                if self._hash_of[b] is None:
                    self._free.move_to_end(b, last=False)

    def reset_prefix_cache(self) -> None:
        """Forget every hash."""
        self._block_of.clear()
        self._hash_of = [None] * self.num_blocks

    def _forget(self, block_id: int) -> None:
        h = self._hash_of[block_id]
        if h is not None:
            self._hash_of[block_id] = None
            if self._block_of.get(h) == block_id:
                del self._block_of[h]
