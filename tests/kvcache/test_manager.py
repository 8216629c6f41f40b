"""Block tables against a store that is written and read through them, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from enginecore.kvcache import BlockPool, BlockTable, KVCacheManager, root_hash
from enginecore.kvcache.hashing import token_bytes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

SIZE = 4


def manager(num_blocks: int = 16, *, prefix_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), SIZE, prefix_caching=prefix_caching)


def computed(kv: KVCacheManager, tokens: list[int], root: bytes | None = None) -> BlockTable:
    """A sequence whose tokens are all computed and offered to the index."""
    table = BlockTable(root if root is not None else root_hash())
    cached = kv.match(table, tokens)
    assert kv.attach(table, cached, kv.blocks_for(len(tokens)))
    start = len(table.hashes) * SIZE
    for i in kv.publish(table, tokens[start : len(tokens) // SIZE * SIZE], len(tokens)):
        kv.note(table, i, token_bytes(tokens[i * SIZE : (i + 1) * SIZE]))
    return table


def test_blocks_for() -> None:
    assert [manager().blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_match_ends_before_the_last_token() -> None:
    kv = manager()
    tokens = list(range(12))
    computed(kv, tokens)
    for length, hit in ((12, 11), (13, 12), (9, 8), (8, 7), (5, 4), (4, 3), (3, 0), (1, 0)):
        prompt = [*tokens, 99][:length]
        assert kv.match(BlockTable(root_hash()), prompt) == hit, length


def test_a_match_ends_at_the_first_block_that_differs() -> None:
    kv = manager()
    computed(kv, list(range(16)))
    assert kv.match(BlockTable(root_hash()), [0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11, 12, 13, 14, 15, 16]) == 4


def test_a_match_goes_on_inside_the_block_that_differs() -> None:
    kv = manager()
    first = computed(kv, list(range(12)))
    for prompt, cached, more in (
        ([0, 1, 2, 3, 4, 5, 6, 99, 8], 4, 3), ([0, 1, 2, 99], 0, 3), ([0, 1, 2], 0, 2), ([0], 0, 0), ([9, 9, 9], 0, 0),
        (list(range(12)), 11, 0), ([*range(12), 12, 13], 12, 0), ([0, 1, 2, 3, 9, 9, 9], 4, 0),
    ):  # fmt: skip
        table = BlockTable(root_hash())
        assert kv.match(table, prompt) == cached
        block, count = kv.match_tail(table, prompt, cached)
        assert (block, count) == (first.blocks[cached // SIZE] if more else -1, more), prompt
        other = BlockTable(root_hash("salt"))
        assert kv.match_tail(other, prompt, kv.match(other, prompt)) == (-1, 0)
    kv.free(first)
    kv.reset()
    assert kv.match_tail(BlockTable(root_hash()), [0, 1, 2], 0) == (-1, 0)


@pytest.mark.parametrize(
    ("a", "b"),
    [((None, None), ("s", None)), (("s", None), ("t", None)), (("s1", None), (None, ("s1", 0))),
     ((None, ("x", 0)), (None, ("x", 1)))],
)  # fmt: skip
def test_salts_and_adapters_hit_their_own_only(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    kv = manager()
    tokens = list(range(13))
    for own, other in ((a, b), (b, a)):
        assert kv.match(BlockTable(root_hash(*own)), tokens) == 0
        computed(kv, tokens, root_hash(*own))
        assert kv.match(BlockTable(root_hash(*own)), tokens) == 12
        kv.reset()
        computed(kv, tokens, root_hash(*other))
        assert kv.match(BlockTable(root_hash(*own)), tokens) == 0
        kv.reset()


def test_attach_shares_what_matched_and_takes_the_rest() -> None:
    kv = manager(8)
    first = computed(kv, list(range(12)))
    second = BlockTable(root_hash())
    assert kv.match(second, list(range(16))) == 12
    assert kv.attach(second, 12, 4)
    assert second.blocks[:3] == first.blocks and kv.pool.ref_count(first.blocks[0]) == 2
    assert kv.pool.num_free == 8 - 4
    kv.free(first)
    kv.free(second)
    assert kv.pool.num_free == 8


def test_a_failed_attach_takes_nothing() -> None:
    kv = manager(4)
    kv.free(computed(kv, list(range(8))))
    busy = kv.pool.allocate(1)
    table = BlockTable(root_hash())
    assert kv.match(table, list(range(20))) == 8
    assert not kv.attach(table, 8, 4) and table.blocks == [] and kv.pool.num_free == 3
    assert kv.pool.num_cached == 2 and busy is not None
    kv.pool.check()


def test_can_attach_counts_matched_blocks_that_nobody_uses() -> None:
    kv = manager(4)
    kv.free(computed(kv, list(range(8))))
    table = BlockTable(root_hash())
    kv.match(table, list(range(16)))
    assert kv.can_attach(table, 8, 4, 0) and not kv.can_attach(table, 8, 4, 1)
    held = computed(kv, list(range(9)))
    assert not kv.can_attach(table, 8, 4, 0) and kv.can_attach(table, 8, 3, 0)
    kv.free(held)


def test_the_tail_is_evicted_before_the_prefix() -> None:
    kv = manager(4)
    table = computed(kv, list(range(16)))
    blocks = list(table.blocks)
    kv.free(table)
    assert kv.pool.allocate(3) == blocks[:0:-1]
    assert kv.match(BlockTable(root_hash()), list(range(16))) == 4


def test_without_prefix_caching_nothing_is_found_or_counted() -> None:
    kv = manager(prefix_caching=False)
    computed(kv, list(range(12)))
    kv.count_query(12, 0)
    assert kv.match(BlockTable(root_hash()), list(range(12))) == 0
    assert kv.pool.num_cached == 0 and kv.queries == 0


def test_a_reset_also_covers_what_running_sequences_have_computed() -> None:
    kv = manager()
    tokens = list(range(16))
    table = BlockTable(root_hash())
    kv.match(table, tokens)
    kv.attach(table, 0, 4)
    kv.publish(table, [], 8)
    assert kv.reset() == 2
    kv.publish(table, [], 16)
    assert kv.pool.num_cached == 0, "a block computed before the reset was offered after it"
    kv.free(table)
    computed(kv, tokens)
    assert kv.match(BlockTable(root_hash()), tokens) == 15


def test_fork_shares_all_and_the_first_writer_copies() -> None:
    kv = manager(8)
    table = computed(kv, list(range(6)))
    twin = kv.fork(table)
    assert twin.blocks == table.blocks and twin.blocks is not table.blocks
    full, tail = table.blocks
    copies = kv.make_writable(twin, 6, 6)
    assert copies == [(1, tail, twin.blocks[1])] and twin.blocks[0] == full and twin.blocks[1] != tail
    assert kv.make_writable(table, 6, 6) == [], "its tail has no other owner any more"
    assert kv.make_writable(twin, 7, 7) == []
    for one in (table, twin):
        kv.free(one)
    assert kv.pool.num_free == 8
    kv.pool.check()


def test_a_write_before_the_shared_tail_leaves_the_tail_protected() -> None:
    kv = manager(8)
    table = BlockTable(root_hash())
    kv.attach(table, 0, 3)
    twin = kv.fork(table)
    assert [index for index, _, _ in kv.make_writable(twin, 0, 3) or []] == [0]
    assert [index for index, _, _ in kv.make_writable(twin, 4, 11) or []] == [1, 2]


def test_copy_on_write_without_room_changes_nothing() -> None:
    kv = manager(2)
    table = computed(kv, list(range(6)))
    twin = kv.fork(table)
    assert kv.make_writable(twin, 6, 6) is None and twin.blocks == table.blocks
    kv.free(table)
    assert kv.make_writable(twin, 6, 6) == []


@dataclass(eq=False)
class Seq:
    """`tokens[:computed]` are in the store, found through `table`."""

    table: BlockTable
    tokens: list[int]
    computed: int = 0
    #: Positions before it that are still computed are in a shared block and are not written.
    write_from: int = 0


class ManagerMachine(RuleBasedStateMachine):
    """The store maps (block, offset) to the whole prefix that was written there, as real keys and values depend on it.

    Reading every sequence back after every step shows aliasing, stale tables, and blocks read before they are written.
    """

    @initialize(num_blocks=st.integers(2, 12), prefix_caching=st.booleans())
    def start(self, num_blocks: int, prefix_caching: bool) -> None:
        self.kv = manager(num_blocks, prefix_caching=prefix_caching)
        self.seqs: list[Seq] = []
        self.store: dict[tuple[int, int], tuple[int, ...]] = {}

    def pick(self, data: st.DataObject) -> Seq:
        return self.seqs[data.draw(st.integers(0, len(self.seqs) - 1))]

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=22),
        salt=st.sampled_from([None, "a"]),
        extra=st.integers(0, 8),
    )
    def enter(self, tokens: list[int], salt: str | None, extra: int) -> None:
        seq = Seq(BlockTable(root_hash(salt)), [0 if salt is None else 2, *tokens])
        free = self.kv.pool.num_free
        cached = self.kv.match(seq.table, seq.tokens)
        assert cached % SIZE == 0 or cached == len(seq.tokens) - 1
        source, more = self.kv.match_tail(seq.table, seq.tokens, cached)
        if more:
            self.kv.pool.share([source])
        able_from = self.kv.pool.num_free
        needed = self.kv.blocks_for(min(cached + more + 1 + extra, len(seq.tokens)))
        able = self.kv.can_attach(seq.table, cached, needed, 0)
        assert self.kv.attach(seq.table, cached, needed) == able
        if able:
            seq.computed, seq.write_from = cached + more, self.write_from(seq, cached)
            self.seqs.append(seq)
            if more:
                self.copy(source, seq.table.blocks[cached // SIZE])
        else:
            assert self.kv.pool.num_free == able_from
        if more:
            self.kv.pool.release([source])
        assert able or self.kv.pool.num_free == free

    def write_from(self, seq: Seq, cached: int) -> int:
        return len(seq.tokens) if self.kv.num_shared(cached) * SIZE > cached else 0

    def copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            self.store.pop((target, offset), None)
            if (source, offset) in self.store:
                self.store[target, offset] = self.store[source, offset]

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), count=st.integers(1, 9), roomy=st.integers(0, 5))
    def compute(self, data: st.DataObject, count: int, roomy: int) -> None:
        """A chunk: grow the table (perhaps beyond the chunk), copy what is shared, write, publish."""
        seq = self.pick(data)
        end = min(seq.computed + count, len(seq.tokens))
        if end == seq.computed:
            return
        needed = max(self.kv.blocks_for(min(end + roomy, len(seq.tokens))), len(seq.table.blocks))
        if self.kv.grow(seq.table, needed) is None:
            assert needed - len(seq.table.blocks) > self.kv.pool.num_free
            return
        before = list(seq.table.blocks)
        copies = self.kv.make_writable(seq.table, seq.computed, end - 1)
        if copies is None:
            assert seq.table.blocks == before
            return
        for index, src, dst in copies:
            assert before[index] == src and seq.table.blocks[index] == dst
            self.copy(src, dst)
        for p in range(max(seq.computed, seq.write_from), end):
            block = seq.table.blocks[p // SIZE]
            assert self.kv.pool.ref_count(block) == 1, "a write reaches a shared block"
            assert self.kv.pool.hash_of(block) is None, "a write reaches a block that others may find"
            self.store[block, p % SIZE] = tuple(seq.tokens[: p + 1])
        seq.computed = end
        start = len(seq.table.hashes) * SIZE
        for i in self.kv.publish(seq.table, seq.tokens[start : end // SIZE * SIZE], end):
            self.kv.note(seq.table, i, token_bytes(seq.tokens[i * SIZE : (i + 1) * SIZE]))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        self.pick(data).tokens += tokens

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        if seq.computed == len(seq.tokens) or data.draw(st.booleans()):
            twin = self.kv.fork(seq.table)
            # Known hashes go over to the twin, so the tokens that they stand for must.
            self.seqs.append(Seq(twin, list(seq.tokens), seq.computed, seq.write_from))

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.seqs.remove(seq)
        self.kv.free(seq.table)
        assert seq.table.blocks == []

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        """The same table enters again, as the scheduler does it."""
        seq = self.pick(data)
        self.kv.free(seq.table)
        cached = self.kv.match(seq.table, seq.tokens)
        if self.kv.attach(seq.table, cached, self.kv.blocks_for(cached + 1)):
            seq.computed, seq.write_from = cached, self.write_from(seq, cached)
        else:
            self.seqs.remove(seq)

    @rule()
    def reset(self) -> None:
        self.kv.reset()
        assert self.kv.pool.num_cached == 0

    @invariant()
    def every_computed_position_holds_its_prefix(self) -> None:
        for seq in self.seqs:
            for p in range(seq.computed):
                assert self.store[seq.table.blocks[p // SIZE], p % SIZE] == tuple(seq.tokens[: p + 1])

    @invariant()
    def no_block_is_lost(self) -> None:
        self.kv.pool.check()
        held = [block for seq in self.seqs for block in seq.table.blocks]
        assert self.kv.pool.num_blocks - self.kv.pool.num_free == len(set(held))
        assert all(self.kv.pool.ref_count(block) == held.count(block) for block in set(held))

    def teardown(self) -> None:
        for seq in self.seqs:
            self.kv.free(seq.table)
        assert self.kv.pool.num_free == self.kv.pool.num_blocks


ManagerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestManagerMachine = ManagerMachine.TestCase
