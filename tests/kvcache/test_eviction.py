"""Who loses a cached block: against a plain restatement of the rules."""

from __future__ import annotations

import pytest
from enginecore.kvcache import BlockPool
from enginecore.kvcache.eviction import Evictor
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


def test_a_tenant_keeps_its_floor_while_others_have_more() -> None:
    evictor = Evictor(floor=2)
    for block, tenant in enumerate("aaabbbbbc"):
        evictor.add(block, tenant, False)
    assert [evictor.pop() for _ in range(4)] == [0, 3, 4, 5], "the oldest of those with more than two"
    assert [evictor.pop() for _ in range(5)] == [1, 2, 6, 7, 8], "at their floors: the oldest of all"


def test_a_tenant_above_its_cap_gives_up_its_own() -> None:
    evictor = Evictor(cap=2)
    assert [evictor.add(block, "a", False) for block in (5, 6, 7)] == [None, None, 5]
    assert evictor.add(8, "b", False) is None and len(evictor) == 3
    assert evictor.add(9, "a", True) is None, "what is pinned does not count"


def test_pinned_blocks_go_last() -> None:
    evictor = Evictor()
    for block in range(4):
        evictor.add(block, "", block < 2)
    evictor.repin(3, True)
    evictor.repin(0, False)
    assert [evictor.pop() for _ in range(4)] == [2, 0, 1, 3]


def test_taking_what_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        Evictor().discard(1)


class EvictionMachine(RuleBasedStateMachine):
    @initialize(floor=st.integers(0, 3), cap=st.sampled_from([None, 1, 3]))
    def start(self, floor: int, cap: int | None) -> None:
        self.evictor = Evictor(floor, cap)
        self.plain: list[tuple[int, str]] = []
        self.pinned: list[tuple[int, str]] = []
        self.next = 0

    def model_add(self, block: int, tenant: str, pinned: bool) -> int | None:
        if pinned:
            self.pinned.append((block, tenant))
            return None
        self.plain.append((block, tenant))
        own = [entry for entry in self.plain if entry[1] == tenant]
        if self.evictor.cap is None or len(own) <= self.evictor.cap:
            return None
        self.plain.remove(own[0])
        return own[0][0]

    @rule(tenant=st.sampled_from("abc"), pinned=st.sampled_from([False, False, True]))
    def add(self, tenant: str, pinned: bool) -> None:
        self.next += 1
        assert self.evictor.add(self.next, tenant, pinned) == self.model_add(self.next, tenant, pinned)

    @precondition(lambda self: self.plain or self.pinned)
    @rule(data=st.data(), pinned=st.sampled_from([None, False, True]))
    def take_or_repin(self, data: st.DataObject, pinned: bool | None) -> None:
        entry = data.draw(st.sampled_from(self.plain + self.pinned))
        (self.plain if entry in self.plain else self.pinned).remove(entry)
        if pinned is None:
            self.evictor.discard(entry[0])
        else:
            tenant = entry[1] if self.evictor.by_tenant else ""
            assert self.evictor.repin(entry[0], pinned) == self.model_add(entry[0], tenant, pinned)

    @precondition(lambda self: self.plain or self.pinned)
    @rule()
    def pop(self) -> None:
        above = [e for e in self.plain if sum(o[1] == e[1] for o in self.plain) > self.evictor.floor]
        wanted = (above or self.plain or self.pinned)[0]
        (self.plain if self.plain else self.pinned).remove(wanted)
        assert self.evictor.pop() == wanted[0]

    @rule()
    def clear(self) -> None:
        assert sorted(self.evictor.clear()) == sorted(block for block, _ in self.plain + self.pinned)
        self.plain, self.pinned = [], []

    @invariant()
    def agrees(self) -> None:
        assert len(self.evictor) == len(self.plain) + len(self.pinned)
        assert self.evictor.num_pinned == len(self.pinned)
        assert all(block in self.evictor for block, _ in self.plain + self.pinned)


EvictionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestEvictionMachine = EvictionMachine.TestCase


def test_pins_of_a_pool() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    assert blocks is not None
    names = [b"%d" % block for block in blocks]
    for block, name in zip(blocks, names, strict=True):
        pool.set_hash(block, name)
    assert pool.pin("early", names[:2], 10.0)
    pool.release(blocks)
    assert pool.pin("late", [names[2], b"not computed yet"], 20.0)
    assert not pool.pin("too many", names[3:5], 20.0) and pool.pins.get("too many") is None
    assert pool.allocate(5) == blocks[3:], "neither those pinned before nor after they were released"
    pool.check()
    pool.expire_pins(10.0)
    assert pool.pins.get("early") is None and pool.allocate(2) == blocks[:2]
    assert pool.allocate(1) == [blocks[2]], "before anything fails, pins give way"
    assert pool.unpin("late") and not pool.unpin("late") and len(pool.pins) == 0
