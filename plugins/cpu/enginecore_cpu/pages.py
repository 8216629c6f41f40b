"""Fetching a cache's pages before they are needed.

The first touch of a page costs more than all that a step writes to it: the system clears it, and under a hypervisor the
host has to find it. One block lies in as many pages as there are layers, so that a step which reaches a new page in one
layer reaches one in all of them: a tenth of a second in which nothing is answered. The beginning of a cache is fetched
while the engine starts; then, whenever blocks are written to that lie near the end of what is there, a stretch more.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

#: Bytes of a new cache that are there when the engine is ready. Blocks are taken from the lowest up.
_FIRST = 256 << 20
#: What is fetched of each layer later, at a time: a huge page.
_STRETCH = 2 << 20
#: Seconds between one layer and the next: steps that are computed meanwhile go on almost as fast.
_PAUSE = 0.004
#: Seconds between looks at whether the process ends.
_LOOK = 0.1


class PagesAhead:
    """`kernels` fetches pages and tells which blocks are written to (`populate`, `wait_for_block`)."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._stopped = threading.Event()
        self._first: list[threading.Thread] = []
        self._later: threading.Thread | None = None

    def start(self, caches: list[torch.Tensor], num_blocks: int) -> None:
        """Begin to fetch the first pages of `caches`, of `num_blocks` blocks each, in two threads."""
        self.stop()
        self._stopped = threading.Event()
        share = min(caches[0].nbytes, _FIRST // len(caches))
        self._first = [
            threading.Thread(target=self._fetch_first, args=(caches[start::2], share, self._stopped))
            for start in range(min(2, len(caches)))
        ]
        following = (list(caches), num_blocks, share, list(self._first), self._stopped)
        self._later = threading.Thread(target=self._follow, args=following)
        for thread in (*self._first, self._later):
            thread.start()

    def wait(self) -> None:
        """Until the first pages are there."""
        for thread in self._first:
            thread.join()

    def stop(self) -> None:
        """Until nothing is fetched any more."""
        self._stopped.set()
        self.wait()
        if self._later is not None:
            self._later.join()
        self._first, self._later = [], None

    def _fetch_first(self, caches: list[torch.Tensor], share: int, stopped: threading.Event) -> None:
        """A little of each cache, then more of each: what is needed first is there first."""
        steps = 4
        for step in range(1, steps + 1):
            for cache in caches:
                if _over(stopped) or not self._kernels.populate(cache, max(1, share * step // steps)):
                    return

    def _follow(
        self, caches: list[torch.Tensor], num_blocks: int, there: int, first: list[threading.Thread], stopped: Any
    ) -> None:
        """`there`: bytes of each cache that the first threads fetch. Ends with the process, which waits for this
        thread: one that is killed inside native code takes the process down."""
        for thread in first:
            thread.join()
        whole, block = caches[0].nbytes, caches[0].nbytes // num_blocks
        while there < whole and not _over(stopped):
            if not self._kernels.wait_for_block(max(0, there - _STRETCH) // block, _LOOK):
                continue
            there = min(whole, there + _STRETCH)
            for cache in caches:
                if stopped.wait(_PAUSE) or not self._kernels.populate(cache, min(there, cache.nbytes)):
                    return


def _over(stopped: threading.Event) -> bool:
    return stopped.is_set() or not threading.main_thread().is_alive()
