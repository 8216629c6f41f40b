"""Tiers below the device: host memory, then local disk. Every full block goes down as soon as it is computed; a prefix
that the device has lost comes up again when somebody asks for it.

    device ── copy ──> host memory ── write ──> disk          a block that is computed
    device <── copy ── host memory <── read ─── disk          a block that is asked for, each arrow a `Transfer`

Writing through, and not when a block is evicted, keeps eviction free of waiting: the copy is there already. A copy down
takes no hold of its block. Instead each allocation of a block counts (`BlockPool.generation`), and a copy is worth
something only if the block still is of the generation that it was of at the beginning: what was given away meanwhile
may be half of each.

All books are kept in the engine's thread. Lanes move bytes; `poll` takes in what they have done.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from enginecore.kvcache.block_pool import BlockPool
from enginecore.kvcache.disk import DiskTier
from enginecore.kvcache.host import HostTier
from enginecore.kvcache.lane import Finish, Lane, Results

HOST, DISK = "host", "disk"
#: Blocks that may wait to be written; beyond that new ones are not written at all.
MAX_WRITES = 512
#: Weight of the newest measurement in a running mean.
NEWEST = 0.3


class BlockMover(Protocol):
    """Moves the bytes of whole blocks between the device and slots of host memory."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""

    def fence(self) -> Callable[[], None]:
        """Called in the engine's thread. What it returns waits, in any thread, for all that the device had to do."""

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (block, slot) pairs down; returns when they are there."""

    def to_device(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (slot, block) pairs up; returns when they are there."""

    def views(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, writable, in an order that does not change."""


@dataclass
class Transfer:
    """Blocks on their way up. `arrived` counts those that are there, `pending` those that are not decided."""

    tier: str
    num_blocks: int
    pending: int
    arrived: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.pending == 0


@dataclass
class TierCounts:
    """Blocks so far: copied down, discarded because the device had given them away, without room in the host tier,
    copied up, written to disk, read from it, and found missing or damaged there."""

    stored: int = 0
    overtaken: int = 0
    no_room: int = 0
    loaded: int = 0
    written: int = 0
    fetched: int = 0
    fetch_failed: int = 0


class Tiers:
    """`pool` is the device's. `copies` moves between device and host memory, `files` reads, `writes` writes; what they
    have done comes back through `results`."""

    def __init__(
        self, mover: BlockMover, pool: BlockPool, host: HostTier, results: Results, copies: Lane,
        disk: DiskTier | None = None, files: Lane | None = None, writes: Lane | None = None,
    ) -> None:  # fmt: skip
        assert disk is None or (files is not None and writes is not None)
        self.host = host
        self.disk = disk
        self.counts = TierCounts()
        #: Measured seconds of one block by what is done with it: "store", "load", "fetch".
        self.seconds: dict[str, float] = {}
        self._mover = mover
        self._pool = pool
        self._results = results
        self._copies = copies
        self._files = files
        self._writes = writes
        self._epoch = 0
        self._to_store: list[tuple[bytes, int, int, bool]] = []
        self._clearing = False
        self._loads = 0

    # ---- down ----------------------------------------------------------------------------------------------------

    def stored(self, block: int, block_hash: bytes, keep: bool) -> None:
        """A block has been computed and can be found on the device. `keep` False: it must not outlive this process."""
        if not self.host.knows(block_hash):
            self._to_store.append((block_hash, block, self._pool.generation(block), keep))

    def submit(self) -> None:
        """Start the copies of what was `stored` since the last call. Call it when the step's work has been given to the
        device."""
        todo, self._to_store = self._to_store, []
        claimed = []
        for block_hash, block, generation, keep in todo:
            slot = None if self.host.knows(block_hash) else self.host.claim(block_hash)
            if slot is None:
                self.counts.no_room += 1
            else:
                claimed.append((block_hash, block, generation, slot, keep))
        if not claimed:
            return
        fence, mover, generation_of = self._mover.fence(), self._mover, self._pool.generation

        def copy() -> Finish:
            fence()
            begun = perf_counter()
            mover.to_host([(block, slot) for _, block, _, slot, _ in claimed])
            seconds = perf_counter() - begun
            whole = [generation_of(block) == generation for _, block, generation, _, _ in claimed]
            return lambda: settle(whole, seconds)

        def settle(whole: list[bool], seconds: float) -> None:
            self._measure("store", seconds / len(claimed))
            for (block_hash, _, _, slot, keep), filled in zip(claimed, whole, strict=True):
                self.counts.overtaken += not filled
                if self.host.settle(block_hash, slot, filled):
                    self.counts.stored += 1
                    if keep:
                        self._write(block_hash, slot)

        self._copies.submit(copy, lambda: settle([False] * len(claimed), 0.0))

    def _write(self, block_hash: bytes, slot: int) -> None:
        disk, writes = self.disk, self._writes
        if disk is None or writes is None or disk.has(block_hash) or self._clearing:
            return
        if not disk.writable or writes.backlog >= MAX_WRITES:
            return
        self.host.hold(slot)
        views_of = self._mover.views

        def write() -> Finish:
            disk.refresh()
            done = disk.has(block_hash) or disk.write(block_hash, views_of(slot))
            return lambda: settle(done)

        def settle(done: bool) -> None:
            self.host.unhold(slot)
            self.counts.written += done

        writes.submit(write, lambda: settle(False))

    # ---- up ------------------------------------------------------------------------------------------------------

    def touch(self, hashes: list[bytes]) -> None:
        """These were found on the device: keep their copies too."""
        for block_hash in hashes:
            self.host.touch(block_hash)

    def reach(self, hashes: list[bytes]) -> tuple[int, int]:
        """(blocks at the start of `hashes` that are in host memory, blocks that are there or on disk)."""
        in_host = total = 0
        disk = None if self._clearing else self.disk
        for block_hash in hashes:
            if self.host.slot(block_hash) is not None:
                in_host += in_host == total
            elif disk is None or not disk.has(block_hash):
                break
            total += 1
        return in_host, total

    def fetch(self, hashes: list[bytes]) -> Transfer | None:
        """Bring blocks from disk to host memory, as many from the start as there are slots for; None for none."""
        disk, files = self.disk, self._files
        assert disk is not None and files is not None
        wanted = []
        for block_hash in hashes:
            self.host.touch(block_hash)
            if not self.host.knows(block_hash):
                slot = self.host.claim(block_hash)
                if slot is None:
                    break
                wanted.append((block_hash, slot))
        if not wanted:
            return None
        transfer = Transfer(DISK, len(wanted), len(wanted))
        for block_hash, slot in wanted:
            self._fetch_one(disk, files, transfer, block_hash, slot)
        return transfer

    def _fetch_one(self, disk: DiskTier, files: Lane, transfer: Transfer, block_hash: bytes, slot: int) -> None:
        views_of = self._mover.views

        def read() -> Finish:
            begun = perf_counter()
            found = disk.read_into(block_hash, views_of(slot))
            seconds = perf_counter() - begun
            return lambda: settle(found, seconds)

        def settle(found: bool, seconds: float) -> None:
            found = self.host.settle(block_hash, slot, found)
            transfer.pending -= 1
            transfer.arrived += found
            transfer.seconds += seconds
            self.counts.fetched += found
            self.counts.fetch_failed += not found
            if found:
                self._measure("fetch", seconds)

        files.submit(read, lambda: settle(False, 0.0))

    def load(self, hashes: list[bytes], blocks: list[int]) -> Transfer:
        """Copy blocks that are in host memory to blocks of the device, which belong to the caller until it is done."""
        pairs = []
        for block_hash, block in zip(hashes, blocks, strict=True):
            slot = self.host.slot(block_hash)
            assert slot is not None, "a block that is to be loaded is not in host memory"
            self.host.touch(block_hash)
            self.host.hold(slot)
            pairs.append((slot, block))
        transfer = Transfer(HOST, len(pairs), len(pairs))
        fence, mover, epoch = self._mover.fence(), self._mover, self._epoch
        self._loads += 1

        def copy() -> Finish:
            fence()
            begun = perf_counter()
            mover.to_device(pairs)
            seconds = perf_counter() - begun
            return lambda: settle(True, seconds)

        def settle(whole: bool, seconds: float) -> None:
            self._loads -= 1
            for slot, _ in pairs:
                self.host.unhold(slot)
            whole = whole and epoch == self._epoch
            transfer.pending, transfer.arrived, transfer.seconds = 0, len(pairs) * whole, seconds
            self.counts.loaded += transfer.arrived
            if whole:
                self._measure("load", seconds / len(pairs))

        self._copies.submit(copy, lambda: settle(False, 0.0), first=True)
        return transfer

    # ---- the whole -----------------------------------------------------------------------------------------------

    @property
    def loading(self) -> bool:
        """Whether blocks of the device are being filled."""
        return self._loads > 0

    @property
    def busy(self) -> bool:
        """Whether anything is being moved."""
        return any(lane is not None and lane.backlog for lane in (self._copies, self._files, self._writes))

    def poll(self) -> bool:
        """Take in what has been moved; whether there was something."""
        return self._results.drain()

    def wait(self, timeout: float) -> None:
        """Wait until something has been moved, at most `timeout` seconds, and take it in."""
        self._results.wait(timeout)
        self._results.drain()

    def settle_copies(self) -> None:
        """Wait until nothing is copied from or to the device any more."""
        self.submit()
        while self._copies.backlog:
            self.wait(0.1)
        self.poll()

    def saving(self, hashes: list[bytes]) -> bool:
        """Whether copies of some of these are under way, to host memory."""
        return any(self.host.knows(each) and self.host.slot(each) is None for each in hashes)

    def clear(self) -> int:
        """Forget every block of every tier; returns how many. What is being moved now is not found afterwards."""
        self._epoch += 1
        self._to_store = []
        count = self.host.clear()
        disk, writes = self.disk, self._writes
        if disk is not None and writes is not None:
            count = max(count, disk.num_blocks)
            self._clearing = True

            def clear() -> Finish:
                disk.clear()
                return cleared

            def cleared() -> None:
                self._clearing = False

            writes.submit(clear, cleared)
        return count

    def close(self, timeout: float = 3.0) -> None:
        """Let what is under way come to its end, for at most `timeout` seconds in all, and end the threads. The copies
        go first: what they bring down may still be written."""
        deadline = perf_counter() + timeout
        for lane in (self._copies, self._files, self._writes):
            if lane is not None:
                lane.close(max(0.0, deadline - perf_counter()))
                with suppress(Exception):
                    self.poll()

    def _measure(self, what: str, seconds: float) -> None:
        before = self.seconds.get(what)
        self.seconds[what] = seconds if before is None else (1 - NEWEST) * before + NEWEST * seconds
