"""The scheduler's part that lets a step be planned while earlier ones are still on the device.

    schedule  N      N+1        N+2
    depart      N        N+1        N+2        the device has the plan: its work counts as done
    book                     N          N+1    its tokens are known

Between `depart` and `book` each sequence that samples has one token more that counts and is not known yet: how many
tokens there are is all that a plan needs. What is only known from the token comes out when the step is booked: a
sequence that has ended meanwhile gives up the one token that was computed for it in vain. A slot's `entries` number
says whether a row of a plan still is the sequence's that it was made for.

Blocks that such a sequence gives back may still be written by the step that is under way; whoever gets them is in a
later one, and steps come to the device in order. Nothing is published in the prefix index, and nothing is taken over
by a fork, before the step that computed it is booked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from enginecore.plan import BoolArray, IntArray, StepPlan
from enginecore.scheduler.beams import Beams
from enginecore.scheduler.tiering import Tiering


@dataclass(frozen=True)
class Flight:
    """A plan that the device has. `entries_N` are its slots' numbers of entry as of then."""

    plan: StepPlan
    entries_N: IntArray
    planned_at: float


class Lookahead(Beams, Tiering):
    """A base of `Scheduler`, which owns what is named here."""

    _chunk: int
    #: Plans that have departed and are not booked.
    _in_flight: int

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        raise NotImplementedError

    def depart(self, plan: StepPlan) -> Flight:
        """The device has the plan: what it computes counts from here on, what it samples as tokens not known yet."""
        table, slots = self.running, plan.slots_N
        table.num_computed_S[slots] = plan.ends_N
        sampled = slots[plan.samples_N]
        table.num_tokens_S[sampled] += 1
        table.ahead_S[sampled] += 1
        self._charge(plan)
        self._in_flight += 1
        return Flight(plan, table.entries_S[slots], self._planned_at)

    def can_plan_ahead(self) -> bool:
        """Whether the next step can be planned before those in flight are booked: it must need no token that is not
        known, and nobody may have to give blocks back."""
        table = self.running
        if self._groups or self._lifts or table.guesses:
            return False
        slots = table.order
        if bool(((table.ahead_S[slots] > 0) & table.needs_tokens_S[slots]).any()):
            return False
        want = np.minimum(table.num_tokens_S[slots] - table.num_computed_S[slots], self._chunk)
        needed = (table.num_computed_S[slots] + want + self.config.block_size - 1) // self.config.block_size
        missing = int(np.maximum(needed - table.num_blocks_S[slots], 0).sum())
        return missing <= self.pool.num_free and self._to_make_way() is None

    def _ending(self, slots: IntArray) -> BoolArray:
        """Which of the slots end by their length as soon as what is in flight is booked: they get no further token."""
        table = self.running
        last = np.maximum(table.max_total_S[slots], table.num_prompt_S[slots] + 1)
        ending: BoolArray = (table.ahead_S[slots] > 0) & (table.num_tokens_S[slots] >= last)
        return ending

    def alive(self, flight: Flight) -> BoolArray:
        """Which rows' sequences still are in their slots."""
        alive: BoolArray = self.running.entries_S[flight.plan.slots_N] == flight.entries_N
        return alive

    def lose(self, flight: Flight) -> list[str]:
        """The step has failed, and nothing of it is booked: end its sequences. Returns their requests' ids."""
        self._in_flight -= 1
        slots = flight.plan.slots_N[self.alive(flight)].tolist()
        return self.abort(dict.fromkeys(self.running.sequence(slot).request_id for slot in slots), reason="error")
