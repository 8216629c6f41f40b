"""The block pool against a model of it: owners are counted in a plain dict, eviction order in a plain list."""

from __future__ import annotations

from collections import Counter

import pytest
from enginecore.kvcache import BlockPool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert first is not None and pool.allocate(2) is None and pool.num_free == 1
    assert pool.allocate(0) == []
    pool.release(first)
    assert pool.num_free == 4
    pool.check()


def test_free_blocks_go_before_cached_ones_and_the_oldest_cached_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.set_hash(block, name)
    pool.release([blocks[1], blocks[0], blocks[2]])
    assert pool.num_free == 4 and pool.num_cached == 3
    assert pool.allocate(1) == [({0, 1, 2, 3} - set(blocks)).pop()]
    assert pool.allocate(2) == [blocks[1], blocks[0]]
    assert [pool.lookup(name) for name in (b"a", b"b", b"c")] == [None, None, blocks[2]]
    pool.check()


def test_use_renews_a_cached_block() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.set_hash(blocks[0], b"a")
    pool.set_hash(blocks[1], b"b")
    pool.release(blocks)
    pool.share([blocks[0]])
    pool.release([blocks[0]])
    assert pool.allocate(1) == [blocks[1]]


def test_blocks_in_use_are_never_evicted() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.set_hash(blocks[0], b"a")
    assert pool.allocate(1) is None
    assert pool.lookup(b"a") == blocks[0]


def test_the_first_block_with_an_identity_keeps_it() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.set_hash(blocks[0], b"a")
    pool.set_hash(blocks[1], b"a")
    pool.set_hash(blocks[0], b"z")
    assert (pool.lookup(b"a"), pool.lookup(b"z"), pool.hash_of(blocks[1])) == (blocks[0], None, None)
    pool.release(blocks)
    assert pool.allocate(1) == [blocks[1]], "the one without an identity is plainly free"
    pool.check()


def test_misuse_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often than it was taken"):
        pool.release(blocks)
    with pytest.raises(KeyError):
        pool.share(blocks)


def test_observers_can_rebuild_the_index() -> None:
    class Mirror:
        def __init__(self) -> None:
            self.index: dict[bytes, int] = {}

        def stored(self, block: int, block_hash: bytes) -> None:
            assert block_hash not in self.index
            self.index[block_hash] = block

        def removed(self, block: int, block_hash: bytes) -> None:
            assert self.index.pop(block_hash) == block

        def cleared(self) -> None:
            self.index.clear()

    mirror = Mirror()
    pool = BlockPool(3, mirror)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block in blocks:
        pool.set_hash(block, b"%d" % block)
    pool.release(blocks)
    pool.allocate(1)
    assert mirror.index == {pool.hash_of(block): block for block in blocks if pool.hash_of(block)} != {}
    assert pool.reset_cache() == 2 and mirror.index == {}


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.refs: Counter[int] = Counter()
        self.names: dict[int, bytes] = {}
        self.evictable: list[int] = []
        self.held: list[int] = []

    @property
    def plain_free(self) -> set[int]:
        return set(range(self.pool.num_blocks)) - set(self.refs) - set(self.evictable)

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        plain = self.plain_free
        blocks = self.pool.allocate(count)
        if count > len(plain) + len(self.evictable):
            assert blocks is None
            return
        assert blocks is not None and len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & set(self.refs), "a block in use was handed out"
        from_plain = min(count, len(plain))
        assert set(blocks[:from_plain]) <= plain
        assert blocks[from_plain:] == self.evictable[: count - from_plain], "eviction is not least recently used first"
        for block in blocks[from_plain:]:
            self.evictable.remove(block)
            del self.names[block]
        self.refs.update(blocks)
        self.held += blocks

    @precondition(lambda self: self.refs or self.evictable)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = sorted(set(self.refs) | set(self.evictable))
        blocks = data.draw(st.lists(st.sampled_from(known), max_size=4, unique=True))
        self.pool.share(blocks)
        for block in blocks:
            if block in self.evictable:
                self.evictable.remove(block)
        self.refs.update(blocks)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        picked = data.draw(st.lists(st.integers(0, len(self.held) - 1), max_size=5, unique=True))
        blocks = [self.held[i] for i in picked]
        self.held = [block for i, block in enumerate(self.held) if i not in picked]
        self.pool.release(blocks)
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                del self.refs[block]
                if block in self.names:
                    self.evictable.append(block)

    @precondition(lambda self: self.refs)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def set_hash(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.set_hash(block, name)
        if block not in self.names and name not in self.names.values():
            self.names[block] = name

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == len(self.names)
        self.names.clear()
        self.evictable.clear()

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        pool.check()
        assert [pool.ref_count(block) for block in range(pool.num_blocks)] == [
            self.refs[block] for block in range(pool.num_blocks)
        ]
        assert pool.num_free == pool.num_blocks - len(self.refs), "a block leaked"
        assert pool.num_cached == len(self.names)
        assert all(pool.lookup(name) == block for block, name in self.names.items())
        assert [pool.is_cached_free(block) for block in range(pool.num_blocks)] == [
            block in self.evictable for block in range(pool.num_blocks)
        ]


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
