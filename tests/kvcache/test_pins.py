"""Pins: what is pinned, for how long, and by how many."""

from __future__ import annotations

from enginecore.kvcache.pins import Pins


def test_the_time_of_a_pin_begins_anew_and_never_shrinks() -> None:
    pins = Pins(10)
    assert pins.add("a", [b"1", b"2"], 5.0) == [b"1", b"2"]
    assert pins.add("a", [b"1", b"2"], 9.0) == [] and pins.add("a", [b"1", b"2"], 7.0) == []
    assert pins.expire(8.9) == [] and len(pins) == 1
    assert pins.expire(9.0) == [b"1", b"2"] and len(pins) == 0 and pins.num_blocks == 0


def test_a_block_is_pinned_as_long_as_anybody_pins_it() -> None:
    pins = Pins(10)
    pins.add("a", [b"1", b"2"], 5.0)
    assert pins.add("b", [b"1", b"3"], 9.0) == [b"3"] and pins.num_blocks == 3
    assert pins.remove("a") == [b"2"] and b"1" in pins and b"2" not in pins
    assert pins.remove("a") is None
    assert [pin.name for pin in pins.all()] == ["b"]
    assert pins.expire(100.0) == [b"1", b"3"]


def test_a_pin_can_change_its_blocks() -> None:
    pins = Pins(10)
    pins.add("a", [b"1", b"2"], 5.0)
    assert pins.add("a", [b"2", b"3"], 6.0) == [b"3"]
    assert b"1" not in pins and b"2" in pins and pins.num_blocks == 2


def test_the_limit_counts_different_blocks_and_refuses_whole_pins() -> None:
    pins = Pins(3)
    assert pins.add("a", [b"1", b"2", b"1"], 5.0) == [b"1", b"2"]
    assert pins.add("b", [b"3", b"4"], 5.0) is None and b"3" not in pins
    assert pins.add("b", [b"2", b"3"], 5.0) == [b"3"]
    assert pins.expire(5.0).sort() is None and pins.num_blocks == 0


def test_one_owner_pins_half_of_what_may_be_pinned() -> None:
    pins = Pins(8)
    assert pins.add("a", [b"1", b"2", b"3"], 5.0, "x") is not None
    assert pins.add("b", [b"3", b"4", b"5"], 5.0, "x") is None, "five different ones"
    assert pins.add("b", [b"3", b"4"], 5.0, "x") == [b"4"] and pins.add("a", [b"1", b"2", b"3"], 6.0, "x") == []
    assert pins.add("c", [b"5", b"6", b"7", b"8"], 5.0, "y") is not None
    assert pins.remove("a") == [b"1", b"2"]
    assert pins.add("d", [b"1", b"2"], 5.0, "x") is not None, "there is room again"
    assert Pins(8).add("all", [b"%d" % i for i in range(8)], 5.0) is not None, "without a name, as operators do"
