"""The persistent batch: what the runner remembers of each slot between steps, as host arrays, and one step's inputs.

Shape suffixes: S slots, L longest sequence, B block-table width, N rows of the plan, T tokens of the step, R logits
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from enginecore.device import RuntimeBatch
from enginecore.plan import NewRequest, StepPlan
from enginecore.request import EngineRequest


@dataclass(frozen=True)
class StepInputs:
    """`batch.logits_indices` lists the sampling rows' last tokens first, in row order (those from the last known one on
    where a row has guesses), then for each (row, first position, count) of `prompt_rows` the tokens whose logits
    predict prompt positions first .. first + count - 1. R: the tokens that are sampled; each one's row of the plan is
    `rows_R`, and its sequence has `lengths_R` tokens before it.
    `late`: the tokens of the step (their places, their slots) whose ids the host does not know; None: it knows all."""

    batch: RuntimeBatch
    sample_rows: list[int]
    rows_R: np.ndarray
    lengths_R: np.ndarray
    prompt_rows: list[tuple[int, int, int]]
    late: tuple[np.ndarray, np.ndarray] | None = None


class PersistentBatch:
    """Token ids, block tables and lengths by slot. Memory grows with what is touched: arrays start as zero pages."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        width = -(-max_model_len // block_size)
        self.tokens_SL = np.zeros((max_num_seqs, max_model_len + 1), np.int64)
        self.block_table_SB = np.zeros((max_num_seqs, width), np.int32)
        self.num_prompt_S = np.zeros(max_num_seqs, np.int64)
        self.requests: list[EngineRequest | None] = [None] * max_num_seqs
        self.request_ids_S = np.full(max_num_seqs, "", object)
        #: Counts who enters each slot.
        self.entries_S = np.zeros(max_num_seqs, np.int64)
        #: The position of the slot's token that is sampled and not known here yet, else -1.
        self.late_S = np.full(max_num_seqs, -1, np.int64)
        #: Next prompt position whose log-probability is owed, by slot.
        self.prompt_logprobs_at: dict[int, int] = {}
        #: First position that is written in the slot's next step, for those that compute one before it.
        self.write_from: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        """Take in what changed since the last step."""
        for move in plan.moves:
            width = -(-move.position // self.block_size)
            self.tokens_SL[move.slots, : move.position] = self.tokens_SL[move.sources, : move.position]
            self.tokens_SL[move.slots, move.position] = move.tokens
            self.block_table_SB[move.slots, :width] = self.block_table_SB[move.sources, :width]
        for new in plan.new:
            self._enter(new)
        for slot, first, blocks in plan.block_updates:
            self.block_table_SB[slot, first : first + len(blocks)] = blocks
        for row, ids in plan.guesses.items():
            end = int(plan.starts_N[row] + plan.num_new_N[row])
            self.tokens_SL[plan.slots_N[row], end - len(ids) : end] = ids

    def _enter(self, new: NewRequest) -> None:
        self.tokens_SL[new.slot, : len(new.token_ids)] = new.token_ids
        self.num_prompt_S[new.slot] = new.num_prompt
        self.requests[new.slot] = new.request
        self.request_ids_S[new.slot] = new.request.request_id
        self.entries_S[new.slot] += 1
        self.late_S[new.slot] = -1
        self.prompt_logprobs_at.pop(new.slot, None)
        self.write_from.pop(new.slot, None)
        if new.write_from:
            self.write_from[new.slot] = new.write_from
        if new.prompt_logprobs_from is not None:
            self.prompt_logprobs_at[new.slot] = new.prompt_logprobs_from + 1

    def request(self, slot: int) -> EngineRequest:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def inputs(self, plan: StepPlan) -> StepInputs:
        """The step as flat arrays: row after row, each row's tokens in order."""
        slots, counts, starts = plan.slots_N, plan.num_new_N, plan.starts_N
        query_start_loc = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        total = int(query_start_loc[-1])
        slots_T = np.repeat(slots, counts)
        positions_T = np.arange(total) - np.repeat(query_start_loc[:-1] - starts, counts)
        seq_lens = starts + counts
        width = -(-int(seq_lens.max()) // self.block_size)
        blocks_T = self.block_table_SB[slots_T, positions_T // self.block_size].astype(np.int64)
        slot_mapping_T = blocks_T * self.block_size + positions_T % self.block_size
        for slot in [slot for slot in self.write_from if slot in slots]:
            slot_mapping_T[(slots_T == slot) & (positions_T < self.write_from.pop(slot))] = -1
        sample_rows = np.flatnonzero(plan.samples_N)
        logits_indices, prompt_rows = self._prompt_rows(plan, query_start_loc)
        rows_R, back_R = _sampled(sample_rows, plan.guesses)
        last = query_start_loc[1:][rows_R] - 1 - back_R
        late_rows = np.flatnonzero(self.late_S[slots] == seq_lens - 1)
        late = (query_start_loc[1:][late_rows].astype(np.int64) - 1, slots[late_rows]) if len(late_rows) else None
        return StepInputs(
            batch=RuntimeBatch(
                token_ids=self.tokens_SL[slots_T, positions_T],
                positions=positions_T,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens.astype(np.int32),
                block_table=self.block_table_SB[slots, :width],
                slot_mapping=slot_mapping_T,
                logits_indices=np.concatenate([last.astype(np.int64), *logits_indices]),
                request_ids=self.request_ids_S[slots].tolist(),
            ),
            sample_rows=sample_rows.tolist(),
            rows_R=rows_R,
            lengths_R=seq_lens[rows_R] - back_R,
            prompt_rows=prompt_rows,
            late=late,
        )

    def _prompt_rows(
        self, plan: StepPlan, query_start_loc: np.ndarray
    ) -> tuple[list[np.ndarray], list[tuple[int, int, int]]]:
        indices: list[np.ndarray] = []
        rows: list[tuple[int, int, int]] = []
        if not self.prompt_logprobs_at:
            return indices, rows
        for row, slot in enumerate(plan.slots_N.tolist()):
            first = self.prompt_logprobs_at.get(slot)
            if first is None:
                continue
            start, end = int(plan.starts_N[row]), int(plan.starts_N[row] + plan.num_new_N[row])
            stop = min(end + 1, int(self.num_prompt_S[slot]))
            if stop > first:
                rows.append((row, first, stop - first))
                indices.append(np.arange(first - 1, stop - 1) - start + int(query_start_loc[row]))
                self.prompt_logprobs_at[slot] = stop
            if stop >= self.num_prompt_S[slot]:
                del self.prompt_logprobs_at[slot]
        return indices, rows

    def expect(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Tokens at these positions are being sampled. Returns the slots' numbers of entry, for `append`."""
        self.late_S[slots] = positions
        entries: np.ndarray = self.entries_S[slots]
        return entries

    def append(
        self, slots: np.ndarray, positions: np.ndarray, token_ids: list[int], entries: np.ndarray | None = None
    ) -> np.ndarray:
        """Remember sampled tokens: they are inputs of steps to come. Returns which of the slots still belong to the
        sequences that the tokens were sampled for, as the numbers of entry tell (None: all)."""
        mine = np.ones(len(slots), np.bool_) if entries is None else self.entries_S[slots] == entries
        tokens = np.array(token_ids, np.int64)
        if not mine.all():
            slots, positions, tokens = slots[mine], positions[mine], tokens[mine]
        self.tokens_SL[slots, positions] = tokens
        self.late_S[slots[self.late_S[slots] == positions]] = -1
        return mine


def _sampled(sample_rows: np.ndarray, guesses: dict[int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(row, how far before the row's last token) of each token after which one is sampled."""
    if not guesses:
        return sample_rows, np.zeros(len(sample_rows), np.int64)
    counts = np.array([len(guesses.get(row, ())) for row in sample_rows.tolist()], np.int64)
    rows_R = np.repeat(sample_rows, counts + 1)
    back_R = np.repeat(np.cumsum(counts + 1) - 1, counts + 1) - np.arange(len(rows_R))
    return rows_R, back_R
