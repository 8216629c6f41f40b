"""The books of host memory: a slot is in one state, and nobody's copy is overwritten while it is read."""

from __future__ import annotations

from enginecore.kvcache.host import HostTier
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


def filled(host: HostTier, *names: bytes) -> list[int]:
    slots = []
    for each in names:
        slot = host.claim(each)
        assert slot is not None and host.settle(each, slot, True)
        slots.append(slot)
    return slots


def test_the_least_recently_used_gives_way() -> None:
    host = HostTier(2)
    filled(host, b"a", b"b")
    host.touch(b"a")
    filled(host, b"c")
    assert host.slot(b"b") is None and host.slot(b"a") is not None and host.evictions == 1


def test_what_is_held_or_being_filled_stays() -> None:
    host = HostTier(2)
    (slot,) = filled(host, b"a")
    host.hold(slot)
    assert host.claim(b"b") is not None and host.claim(b"c") is None
    host.unhold(slot)
    assert host.claim(b"c") == slot


class HostMachine(RuleBasedStateMachine):
    """Against a model that remembers what each slot's bytes are."""

    @initialize(slots=st.integers(1, 5))
    def start(self, slots: int) -> None:
        self.host = HostTier(slots)
        self.bytes: dict[int, bytes] = {}
        self.filling: list[tuple[bytes, int]] = []
        self.reading: list[tuple[bytes, int]] = []

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]))
    def claim(self, name: bytes) -> None:
        if self.host.knows(name):
            return
        slot = self.host.claim(name)
        busy = {slot for _, slot in self.filling + self.reading}
        if slot is None:
            assert len(busy) == self.host.num_slots
            return
        assert slot not in busy, "a slot in use was handed out"
        self.bytes[slot] = b"?"
        self.filling.append((name, slot))

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), works=st.booleans())
    def settle(self, data: st.DataObject, works: bool) -> None:
        name, slot = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        self.bytes[slot] = name if works else b"?"
        assert works or not self.host.settle(name, slot, works)
        if works:
            self.host.settle(name, slot, True)

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def read(self, name: bytes) -> None:
        slot = self.host.slot(name)
        if slot is not None:
            self.host.hold(slot)
            self.reading.append((name, slot))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def read_ends(self, data: st.DataObject) -> None:
        name, slot = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        assert self.bytes[slot] == name, "it was overwritten while it was read"
        self.host.unhold(slot)

    @rule()
    def clear(self) -> None:
        self.host.clear()
        assert self.host.num_ready == 0

    @invariant()
    def what_is_found_is_what_was_filled(self) -> None:
        self.host.check()
        for name in (b"a", b"b", b"c", b"d", b"e", b"f"):
            slot = self.host.slot(name)
            assert slot is None or self.bytes[slot] == name

    def teardown(self) -> None:
        for name, slot in self.filling:
            self.host.settle(name, slot, False)
        for _, slot in self.reading:
            self.host.unhold(slot)
        self.host.clear()
        assert sorted(self.host._free) == list(range(self.host.num_slots)), "a slot is lost"


HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHostMachine = HostMachine.TestCase
