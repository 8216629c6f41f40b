"""The pool of KV blocks: reference counts, the prefix index and least-recently-used eviction.

A block is in exactly one of three states:

    free         no owner, no identity                        -> taken first
    cached-free  no owner, but its content may be asked for   -> taken next, by `eviction.py`
    in use       `ref_count` owners, more than one when sequences agree

Identities (hashes) point at blocks in use or cached-free. Nothing here knows what a block holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from enginecore.kvcache.eviction import Evictor
from enginecore.kvcache.pins import Pins


class BlockObserver(Protocol):
    """Told of changes of the prefix index (for events and for explanations)."""

    def stored(self, block: int, block_hash: bytes) -> None: ...

    def removed(self, block: int, block_hash: bytes) -> None: ...

    def cleared(self) -> None: ...


class BlockPool:
    """`num_blocks` blocks, numbered from 0. Every call is O(blocks named) unless `evictor` has a floor. At most half of
    the blocks can be pinned."""

    def __init__(
        self, num_blocks: int, observer: BlockObserver | None = None, evictor: Evictor | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._ref = [0] * num_blocks
        self._generation = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached_free = Evictor() if evictor is None else evictor
        self._tenant = [""] * num_blocks
        self.pins = Pins(num_blocks // 2)
        self._observer = observer

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free and cached-free."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_empty(self) -> int:
        """Free blocks that nobody can ask for."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks with an identity."""
        return len(self._index)

    def ref_count(self, block: int) -> int:
        return self._ref[block]

    def generation(self, block: int) -> int:
        """How often the block has been handed out. A copy of it counts if this is the same before and after."""
        return self._generation[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hash[block]

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each and no identity, or None (and nothing taken) when there are too few."""
        if count > len(self._free) + len(self._cached_free):
            return None
        free, blocks = self._free, []
        for _ in range(count):
            if free:
                block = free.pop()
            else:
                block = self._cached_free.pop()
                self._forget(block)
            self._ref[block] = 1
            self._generation[block] += 1
            blocks.append(block)
        return blocks

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this identity; it is not taken."""
        return self._index.get(block_hash)

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block."""
        for block in blocks:
            if self._ref[block] == 0:
                self._cached_free.discard(block)  # KeyError: the block is free, and sharing it would be a bug
            self._ref[block] += 1

    def is_cached_free(self, block: int) -> bool:
        return self._ref[block] == 0 and self._hash[block] is not None

    def release(self, blocks: Iterable[int]) -> None:
        """Take an owner from each block. Pass a sequence's blocks last one first: then its tail is evicted before the
        prefix that others are likelier to ask for."""
        for block in blocks:
            count = self._ref[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._ref[block] = count
            if count == 0:
                block_hash = self._hash[block]
                if block_hash is None:
                    self._free.append(block)
                    continue
                gone = self._cached_free.add(block, self._tenant[block], block_hash in self.pins)
                if gone is not None:
                    self._forget(gone)
                    self._free.append(gone)

    def set_hash(self, block: int, block_hash: bytes, tenant: str = "") -> bool:
        """Give a full block of a tenant its identity. If another block has it already, that one stays the one that is
        found, and the answer is False."""
        if self._hash[block] is not None or block_hash in self._index:
            return False
        self._hash[block] = block_hash
        self._tenant[block] = tenant
        self._index[block_hash] = block
        if self._observer is not None:
            self._observer.stored(block, block_hash)
        return True

    def reset_cache(self) -> int:
        """Forget every identity; blocks in use stay in use. Returns how many were forgotten."""
        forgotten = len(self._index)
        for block in self._index.values():
            self._hash[block] = None
        self._index.clear()
        self._free.extend(self._cached_free.clear())
        if self._observer is not None:
            self._observer.cleared()
        return forgotten

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        if block_hash is None:
            return
        self._hash[block] = None
        del self._index[block_hash]
        if self._observer is not None:
            self._observer.removed(block, block_hash)

    # ---- pinned prefixes -----------------------------------------------------------------------------------------

    def pin(self, name: str, hashes: Iterable[bytes], ends: float, owner: str = "") -> bool:
        """Evict these blocks last until the moment `ends`, those too that are computed later; False when too many are
        pinned already, by all or by this owner."""
        fresh = self.pins.add(name, hashes, ends, owner)
        if fresh is None:
            return False
        self._repin(fresh, True)
        return True

    def unpin(self, name: str) -> bool:
        """End a pin; False when there is none of that name."""
        freed = self.pins.remove(name)
        self._repin(freed or [], False)
        return freed is not None

    def expire_pins(self, now: float) -> None:
        if len(self.pins):
            self._repin(self.pins.expire(now), False)

    def _repin(self, hashes: Iterable[bytes], pinned: bool) -> None:
        for block_hash in hashes:
            block = self._index.get(block_hash)
            if block is not None and block in self._cached_free:
                gone = self._cached_free.repin(block, pinned)
                if gone is not None:
                    self._forget(gone)
                    self._free.append(gone)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests; O(num_blocks)."""
        free, cached = set(self._free), {block for block in range(self.num_blocks) if block in self._cached_free}
        assert len(cached) == len(self._cached_free), "an evictable block is listed twice"
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & cached, "a block is free and cached-free"
        for block in range(self.num_blocks):
            in_use = self._ref[block] > 0
            assert in_use != (block in free or block in cached), f"block {block} is lost or has two states"
            assert not (block in free and self._hash[block]), f"free block {block} has an identity"
        for block_hash, block in self._index.items():
            assert self._hash[block] == block_hash, f"the index and block {block} disagree"
