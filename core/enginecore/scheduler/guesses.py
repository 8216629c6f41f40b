"""The scheduler's part in speculation: room for guessed tokens in a step, and what came of them.

A guess never costs anybody anything but time: it gets blocks only when enough are free, and it counts as computed only
once it is known to be right. Keys and values of wrong guesses stay where they are until the tokens that take their
positions overwrite them; no block with one is published.
"""

from __future__ import annotations

import numpy as np

from enginecore.kvcache import BlockPool
from enginecore.plan import IntArray, StepPlan, StepResult
from enginecore.request import EngineStats
from enginecore.scheduler.running import RunningTable


class Guesses:
    """A base of `Scheduler`, which owns what is named here."""

    running: RunningTable
    pool: BlockPool
    _counts: EngineStats
    _watermark: int

    def _with_guesses(self, slots: IntArray, want: IntArray, block_size: int) -> IntArray:
        """The tokens that each slot wants, with those that are guessed for it; without them where the blocks that they
        need are not free."""
        table = self.running
        extra = np.array([len(table.guesses.get(slot, ())) for slot in slots.tolist()], np.int64)
        extra[want != 1] = 0
        blocks = (table.num_computed_S[slots] + want + extra + block_size - 1) // block_size
        missing = int(np.maximum(blocks - table.num_blocks_S[slots], 0).sum())
        return want if missing + self._watermark > self.pool.num_free else want + extra

    def _guessed(self, slots: IntArray, ends: IntArray) -> dict[int, list[int]]:
        """By row, the guesses that a plan which computes up to `ends` has room for."""
        guesses: dict[int, list[int]] = {}
        beyond = ends - self.running.num_tokens_S[slots]
        for row, slot in enumerate(slots.tolist()):
            ids = self.running.guesses.pop(slot, None)
            if ids and beyond[row] > 0:
                guesses[row] = ids[: int(beyond[row])]
                self._counts.num_drafted += len(guesses[row])
        return guesses

    def _take_accepted(self, plan: StepPlan, result: StepResult, rows: IntArray, tokens: IntArray,
                       ends: IntArray) -> dict[int, list[int]]:  # fmt: skip
        """Book the guesses of live rows that held. Returns each such row's new tokens, up to the first that stops it;
        its last one is put into `tokens`, and `ends` becomes where that one goes."""
        table, taken = self.running, {}
        for i, row in enumerate(rows.tolist()):
            if row not in result.accepted:
                continue
            slot = int(plan.slots_N[row])
            chain = _up_to_stop([int(tokens[i]), *result.accepted[row]], table, slot)
            count = len(chain) - 1
            table.tokens_SL[slot, ends[row] : ends[row] + count] = chain[:-1]
            ends[row] += count
            table.num_tokens_S[slot] += count
            table.num_computed_S[slot] += count
            tokens[i] = chain[-1]
            taken[row] = chain
            self._counts.num_accepted += count
            self._counts.generation_tokens += count
        return taken

    def _keep_guesses(self, slots: IntArray, guesses: dict[int, list[int]]) -> None:
        """For the next plan, as far as the sequences' lengths permit: after the last guess one more is sampled."""
        table = self.running
        for row, ids in guesses.items():
            slot = int(slots[row])
            room = int(table.max_total_S[slot] - table.num_tokens_S[slot]) - 1
            if table.sequences[slot] is not None and room > 0:
                table.guesses[slot] = ids[:room]


def _up_to_stop(chain: list[int], table: RunningTable, slot: int) -> list[int]:
    """Nothing comes after a stop token."""
    stops = table.many_stops.get(slot, table.stop_SX[slot].tolist())
    for i, token in enumerate(chain):
        if token in stops:
            return chain[: i + 1]
    return chain
