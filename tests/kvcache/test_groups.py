"""Groups of layers in one pool, read back as their kernels would: within the window, by the state, all of it."""

from __future__ import annotations

import pytest
from enginecore.kvcache import BlockPool, root_hash
from enginecore.kvcache.groups import GroupedCache, GroupedSequence, GroupSpec, same_pages
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

FULL = GroupSpec(name="full", kind="full", block_size=4, token_bytes=100)
WINDOW = GroupSpec(name="window", kind="sliding_window", block_size=4, token_bytes=100, window=6)
CHUNK = GroupSpec(name="chunk", kind="chunked_local", block_size=4, token_bytes=100, window=8)
MLA = GroupSpec(name="mla", kind="mla", block_size=4, token_bytes=40)
STATE = GroupSpec(name="state", kind="recurrent", block_size=8, state_bytes=300)
CROSS = GroupSpec(name="cross", kind="cross", block_size=4, token_bytes=100)


def cache(num_pages: int, *specs: GroupSpec) -> GroupedCache:
    return GroupedCache(BlockPool(num_pages), list(specs))


def run(cached: GroupedCache, tokens: list[int], chunk: int = 4) -> GroupedSequence:
    sequence = cached.open(root_hash())
    hit = cached.match(sequence, tokens)
    assert cached.attach(sequence, hit) is not None
    for begin in range(hit, len(tokens), chunk):
        end = min(begin + chunk, len(tokens))
        assert cached.grow(sequence, end)
        cached.advance(sequence, tokens, end)
    return sequence


def held(sequence: GroupedSequence, name: str) -> int:
    return sum(page is not None for page in sequence.tables[name].pages)


def test_pages_of_one_size() -> None:
    specs, page_bytes = same_pages([FULL, MLA, STATE, WINDOW])
    assert page_bytes == 400
    assert {spec.name: spec.block_size for spec in specs} == {"full": 4, "mla": 8, "state": 8, "window": 4}
    assert all(spec.page_bytes <= page_bytes for spec in specs)
    (state_is_large, _), page_bytes = same_pages([MLA, GroupSpec(**{**vars(STATE), "state_bytes": 5000})])
    assert state_is_large.block_size == 64 and page_bytes == 5000


def test_a_window_holds_no_more_than_the_window() -> None:
    cached = cache(64, FULL, WINDOW)
    sequence = run(cached, list(range(40)))
    assert held(sequence, "full") == 10
    assert held(sequence, "window") == 2, "tokens 35 to 39 of the next token's window: pages 8 and 9"
    assert sequence.tables["window"].pages[:8] == [None] * 8
    assert cached.pool.num_free == 64 - 12
    assert cached.pages_for(40, 4) == 10 + 4


def test_a_hit_needs_the_window_only() -> None:
    tokens = list(range(40))
    cached = cache(64, WINDOW)
    sequence = run(cached, tokens)
    cached.free(sequence)
    table = sequence.tables["window"]
    for i in (0, 3, 6):  # long out of the window that ends at 36
        page = cached.pool.lookup(table.hashes[i])
        assert page is not None
        cached.pool._forget(page)
        cached.pool._cached_free.discard(page)
        cached.pool._free.append(page)
    again = cached.open(root_hash())
    assert cached.match(again, tokens) == 36
    assert cached.attach(again, 36) == [] and held(again, "window") == 2
    assert [page is None for page in again.tables["window"].pages] == [True] * 7 + [False] * 2


def test_a_hit_is_one_in_every_group() -> None:
    tokens = list(range(33))
    cached = cache(64, FULL, WINDOW, STATE)
    run(cached, tokens)
    again = cached.open(root_hash())
    assert cached.match(again, tokens) == 32
    state_at_32 = cached.pool.lookup(again.tables["state"].hashes[3])
    assert state_at_32 is not None
    cached.pool._forget(state_at_32)
    assert cached.match(again, tokens) == 24, "the state before"


def test_a_state_goes_on_in_a_copy_and_stays_findable() -> None:
    cached = cache(16, STATE)
    sequence = cached.open(root_hash())
    tokens = list(range(20))
    assert cached.grow(sequence, 8)
    (page,) = sequence.tables["state"].pages
    copies = cached.advance(sequence, tokens, 8)
    assert copies == [(page, sequence.tables["state"].pages[0])] and cached.pool.num_free == 15
    assert cached.advance(sequence, tokens, 12) == [] and held(sequence, "state") == 1
    again = cached.open(root_hash())
    assert cached.match(again, tokens) == 8
    copies = cached.attach(again, 8)
    assert copies is not None and copies[0][0] == page and copies[0][1] not in (page, None)


def test_a_state_that_no_chunk_ends_at_is_not_kept() -> None:
    cached = cache(16, STATE)
    run(cached, list(range(21)), chunk=5)
    assert cached.match(cached.open(root_hash()), list(range(21))) == 0


def test_encoder_tokens_have_pages_of_their_own_and_no_prefixes() -> None:
    cached = cache(16, FULL, CROSS)
    sequence = cached.open(root_hash())
    assert cached.grow(sequence, 4, num_encoder_tokens=10)
    assert held(sequence, "cross") == 3 and held(sequence, "full") == 1
    cached.advance(sequence, [1, 2, 3, 4], 4)
    assert cached.pool.num_cached == 1
    cached.free(sequence)
    assert cached.pool.num_free == 16


@pytest.mark.parametrize("spec", [FULL, WINDOW, CHUNK, STATE])
def test_without_room_nothing_is_taken(spec: GroupSpec) -> None:
    cached = cache(1, spec, MLA)
    sequence = cached.open(root_hash())
    assert not cached.grow(sequence, 8) and cached.pool.num_free == 1


class GroupsMachine(RuleBasedStateMachine):
    """The store maps (page, offset) to the whole prefix at that token, and a state page to what it is the state of."""

    @initialize(
        num_pages=st.integers(8, 40),
        specs=st.sampled_from([
            [FULL, WINDOW], [WINDOW, STATE], [FULL, CHUNK, STATE], [MLA, STATE], [FULL, WINDOW, CHUNK, STATE],
        ]),
    )  # fmt: skip
    def start(self, num_pages: int, specs: list[GroupSpec]) -> None:
        self.cached = cache(num_pages, *specs)
        self.store: dict[tuple[int, int], tuple[int, ...]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.live: list[tuple[GroupedSequence, list[int]]] = []

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.states[target] = self.states[source]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def enter(self, tokens: list[int]) -> None:
        sequence = self.cached.open(root_hash())
        hit = self.cached.match(sequence, tokens)
        assert hit < len(tokens) and hit % self.cached.granule == 0
        free = self.cached.pool.num_free
        copies = self.cached.attach(sequence, hit)
        if copies is None:
            assert self.cached.pool.num_free == free
            return
        self.copy(copies)
        self.live.append((sequence, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 12))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence, tokens = data.draw(st.sampled_from(self.live))
        begin, end = sequence.num_computed, min(sequence.num_computed + count, len(tokens))
        if begin == end or not self.cached.grow(sequence, end):
            return
        for name, spec in self.cached.specs.items():
            table = sequence.tables[name]
            if spec.kind == "recurrent":
                page = table.pages[0]
                assert page is not None and self.cached.pool.hash_of(page) is None, "others find what is written"
                assert begin == 0 or self.states[page] == tuple(tokens[:begin]), "another state than the past's"
                self.states[page] = tuple(tokens[:end])
                continue
            for position in range(begin, end):
                page = table.pages[position // spec.block_size]
                assert page is not None and self.cached.pool.ref_count(page) == 1, "a write reaches a shared page"
                assert self.cached.pool.hash_of(page) is None, "a write reaches a page that others find"
                self.store[page, position % spec.block_size] = tuple(tokens[: position + 1])
            for position in range(begin, end):
                for seen in range(spec.first_needed(position), position + 1):
                    page = table.pages[seen // spec.block_size]
                    assert page is not None, "a page within the window was released"
                    assert self.store[page, seen % spec.block_size] == tuple(tokens[: seen + 1])
        self.copy(self.cached.advance(sequence, tokens, end))
        most = self.cached.pages_for(len(tokens), count)
        assert sum(held(sequence, name) for name in sequence.tables) <= most

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.live) - 1))
        self.cached.free(self.live.pop(index)[0])

    @invariant()
    def books(self) -> None:
        self.cached.pool.check()
        if not self.live:
            assert self.cached.pool.num_free == self.cached.pool.num_blocks, "a page leaked"


GroupsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestGroupsMachine = GroupsMachine.TestCase
