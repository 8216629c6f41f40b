"""The scheduler's part that brings blocks up from the tiers below the device.

A sequence at the head of the queue whose prefix goes on in host memory or on disk is taken out of the queue while its
blocks come up (a `Lift`), and others go on. First what is on disk is read into host memory; then the sequence comes
back to the queue, gets blocks of the device and leaves it again while these are filled. When they are, they are cached
blocks like any others, nobody's, and the sequence finds them in the queue's usual way. So nothing is held while it
waits, and what is evicted meanwhile is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from enginecore.kvcache import BlockPool
from enginecore.kvcache.hashing import token_bytes
from enginecore.kvcache.tiers import Tiers, Transfer
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineStats
from enginecore.scheduler.costs import Costs
from enginecore.scheduler.sequence import Sequence
from enginecore.scheduler.sharing import Sharing

#: What of a sequence's prefix has been brought up since it last ran.
NOTHING, TO_HOST, TO_DEVICE = range(3)


@dataclass(eq=False)
class Lift:
    """A sequence whose blocks come up. `first` is the place of the first of them in its table, for those that go to the
    device; `epoch` the cache's when it began."""

    sequence: Sequence
    transfer: Transfer
    first: int
    epoch: int
    begun: float
    to_device: bool
    aborted: bool = field(default=False)


class Tiering(Sharing):
    """A base of `Scheduler`, which owns what is named here."""

    pool: BlockPool
    tiers: Tiers | None
    costs: Costs
    _lifts: list[Lift]
    _planned_at: float
    _timed_at: float
    _counts: EngineStats

    def _lift(self, sequence: Sequence, cached: int, whole: int, spare: int) -> bool:
        """Begin to bring up what follows the first `cached` tokens of the waiting sequence that is next; whether it has
        left the queue. `whole` and `spare` are blocks, as for `can_attach`."""
        tiers, size = self.tiers, self.config.block_size
        if tiers is None or sequence.lifted == TO_DEVICE or not sequence.reads_cache or not self.config.prefix_caching:
            return False
        last = len(sequence.token_ids) - 1
        begin, limit = cached // size, self.kv.num_shared(last)
        if cached == last:
            return False
        hashes = sequence.table.hashes[begin:limit]
        in_host, total = tiers.reach(hashes)
        costs, seconds = self.costs, tiers.seconds.get
        if total > in_host and sequence.lifted == NOTHING and costs.worth_moving(seconds("fetch"), seconds("load")):
            sequence.lifted = TO_HOST
            transfer = tiers.fetch(hashes[:total])
            if transfer is not None:
                self._begin_lift(sequence, transfer, begin, to_device=False)
                return True
        if not in_host or not self.kv.can_attach(sequence.table, cached, whole, spare):
            return False
        sequence.lifted = TO_DEVICE
        if not costs.worth_moving(seconds("load")) or not self.kv.attach(sequence.table, cached, begin + in_host):
            return False
        transfer = tiers.load(hashes[:in_host], sequence.table.blocks[begin:])
        self._begin_lift(sequence, transfer, begin, to_device=True)
        return True

    def _begin_lift(self, sequence: Sequence, transfer: Transfer, first: int, *, to_device: bool) -> None:
        self.waiting.pop()
        begun = self.journal.clock()
        self._lifts.append(Lift(sequence, transfer, first, sequence.table.epoch, begun, to_device))

    def _take_in(self) -> None:
        """End the lifts whose blocks are there."""
        if self.tiers is None:
            return
        self.tiers.poll()
        for lift in [lift for lift in self._lifts if lift.transfer.done]:
            self._lifts.remove(lift)
            self._end_lift(lift)

    def _end_lift(self, lift: Lift) -> None:
        sequence, transfer, table = lift.sequence, lift.transfer, lift.sequence.table
        size = self.config.block_size
        if lift.to_device:
            arrived = transfer.arrived if self.kv.publishes(table) else 0
            for i in range(lift.first, lift.first + arrived):
                if not self.pool.set_hash(table.blocks[i], table.hashes[i], table.tenant):
                    continue
                tokens = sequence.token_ids[i * size : (i + 1) * size]
                self.kv.note(table, i, token_bytes(tokens))
                if self.events is not None:
                    parent = table.hashes[i - 1] if i else None
                    self._tell_stored(sequence, [table.hashes[i]], parent, tokens)
            self.kv.free(table)
            self._counts.lifted_tokens += arrived * size
        else:
            self._counts.fetched_tokens += transfer.arrived * size
        seconds = self.journal.clock() - lift.begun
        self.journal.moved(sequence.request_id, transfer.tier, transfer.num_blocks, transfer.arrived, seconds)
        if not lift.aborted:
            self.waiting.push(sequence)

    def _drop_lift(self, sequence: Sequence) -> bool:
        """Whether an aborted sequence was being lifted; its blocks come back when nothing is written there any more."""
        for lift in self._lifts:
            if lift.sequence is sequence:
                lift.aborted = True
                return True
        return False

    def _hurry(self) -> bool:
        """Blocks are short: wait for those that are being filled, which takes no longer than copying them. Whether any
        came back."""
        tiers = self.tiers
        if tiers is None or not any(lift.to_device for lift in self._lifts):
            return False
        while any(lift.to_device and not lift.transfer.done for lift in self._lifts):
            tiers.wait(1.0)
        self._take_in()
        return True

    @property
    def _num_lifting(self) -> int:
        return sum(not lift.aborted for lift in self._lifts)

    def _time_step(self, planned_at: float, plan: StepPlan, result: StepResult) -> None:
        """What computing costs, from a step that has just ended. One that was planned before the last had ended began
        when that had."""
        if self.tiers is not None:
            now = self.journal.clock()
            seconds = result.seconds if result.seconds is not None else now - max(planned_at, self._timed_at)
            self._timed_at = now
            self.costs.computed(plan.num_tokens, seconds)

    def _send_down(self, sequence: Sequence, stored: list[int]) -> None:
        """These blocks of a running sequence are full. What an adapter has made must not outlive its load generation,
        which counts from 0 in each process."""
        if self.tiers is not None:
            table, keep = sequence.table, sequence.request.adapter is None
            for i in stored:
                self.tiers.stored(table.blocks[i], table.hashes[i], keep)

    def _save(self, sequence: Sequence) -> bool:
        """A sequence is about to lose its blocks: when it is cheaper to bring them up again than to compute them, wait
        until their copies are complete. Whether its next run will find them below."""
        tiers, table = self.tiers, sequence.table
        if tiers is None or not sequence.reads_cache or not table.hashes:
            return False
        if not self.costs.worth_moving(tiers.seconds.get("load")):
            return False
        tiers.submit()
        while tiers.saving(table.hashes[: table.num_published]):
            tiers.wait(1.0)
        return tiers.reach(table.hashes[: table.num_published])[0] > 0

    # ---- for the engine ------------------------------------------------------------------------------------------

    def wait_for_blocks(self, timeout: float) -> bool:
        """When the plan is empty: wait until some block has come up, at most so long. False when none is on its way."""
        if self.tiers is None or not self._lifts:
            return False
        self.tiers.wait(timeout)
        return True

    def lose_device_cache(self) -> int:
        """The device is about to lose its cache, and nothing runs: let moves come to their end, and forget what is
        cached there. Returns how many blocks were forgotten."""
        if self.tiers is not None:
            self.tiers.settle_copies()
            self._take_in()
        return self.kv.reset()

    def tidy(self) -> bool:
        """Take in what has been moved while nothing runs; whether something still is."""
        self._take_in()
        return self.tiers is not None and self.tiers.busy

    def tier_figures(self) -> dict[str, int]:
        """Blocks in lower tiers and what has been done with them, by name; empty without such tiers."""
        tiers = self.tiers
        if tiers is None:
            return {}
        counts = tiers.counts
        figures = {
            "host_slots": tiers.host.num_slots, "host_blocks": tiers.host.num_ready,
            "host_evicted": tiers.host.evictions, "host_stored": counts.stored, "host_overtaken": counts.overtaken,
            "host_no_room": counts.no_room, "host_loaded": counts.loaded, "swaps": self._counts.num_swaps,
        }  # fmt: skip
        if tiers.disk is not None:
            disk = tiers.disk
            figures |= {
                "disk_blocks": disk.num_blocks, "disk_bytes": disk.num_bytes, "disk_limit": disk.limit,
                "disk_written": counts.written, "disk_read": counts.fetched, "disk_failed": counts.fetch_failed,
                "disk_damaged": disk.damaged, "disk_deleted": disk.deleted, "disk_writable": int(disk.writable),
            }  # fmt: skip
        return figures
