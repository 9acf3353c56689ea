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
        self._empty = list(range(num_blocks))[::-1]
        """Free blocks that no hash finds: the last one is taken first."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks that were freed with a hash, taken when no empty one is left: the first one first."""

    @property
    def num_free(self) -> int:
        """Blocks that nothing refers to; those that are still known by hash count too."""
        return len(self._empty) + len(self._cached)

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
        return self.num_free - sum(1 for b in taken if self._refs[b] == 0)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a reference to known blocks."""
        for b in block_ids:
            if self._refs[b] == 0:
                del self._cached[b]
            self._refs[b] += 1

    def allocate(self, count: int) -> list[int] | None:
        """``count`` blocks with one reference each, or None when there are not that many. Their old hashes
        are forgotten."""
        if count > self.num_free:
            return None
        first = max(0, len(self._empty) - count)
        taken = self._empty[first:][::-1]
        del self._empty[first:]
        while len(taken) < count:
            b, _none = self._cached.popitem(last=False)
            self._forget(b)
            taken.append(b)
        for b in taken:
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
                if self._hash_of[b] is None:
                    self._empty.append(b)
                else:
                    self._cached[b] = None

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
