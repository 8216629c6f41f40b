"""The engine's time. With a `VirtualClock` a simulated device runs the real engine as fast as the host computes."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some moment that does not change; never goes back."""

    def now(self) -> float: ...

    def wait_until(self, moment: float) -> None:
        """Return when it is `moment`; at once when that is past."""

    def spend(self, seconds: float) -> None:
        """Let the modelled time of a step pass. Steps of real devices have taken theirs already."""


class RealClock:
    """`time.monotonic`, which the frontend's times are on too."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        self.spend(moment - self.now())

    def spend(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """Stands still unless told otherwise. `busy_s` is what was spent, the rest of `now` was waited for."""

    def __init__(self) -> None:
        self._now = 0.0
        self.busy_s = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def spend(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds} s")
        self._now += seconds
        self.busy_s += seconds
