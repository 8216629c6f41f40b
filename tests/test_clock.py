"""Clocks: what passes time and what does not."""

from __future__ import annotations

import time

import pytest
from enginecore.clock import RealClock, VirtualClock


def test_virtual_time_stands_still_unless_told() -> None:
    clock = VirtualClock()
    assert (clock.now(), clock.busy_s) == (0.0, 0.0)
    clock.spend(2.5)
    clock.wait_until(4.0)
    clock.wait_until(1.0)
    clock.spend(0.5)
    assert (clock.now(), clock.busy_s) == (4.5, 3.0)
    with pytest.raises(ValueError, match="does not go back"):
        clock.spend(-1e-9)


def test_virtual_time_takes_none() -> None:
    clock = VirtualClock()
    clock.spend(1e9)
    clock.wait_until(2e9)
    assert clock.now() == 2e9


def test_real_time_passes_by_itself_and_is_slept_through() -> None:
    clock = RealClock()
    begun = time.monotonic()
    clock.spend(0.02)
    clock.wait_until(begun + 0.04)
    clock.wait_until(begun - 100)
    assert clock.now() - begun >= 0.04
