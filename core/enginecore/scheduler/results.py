"""The scheduler's part that books what came of a step."""

from __future__ import annotations

import numpy as np

from enginecore.plan import IntArray, StepPlan, StepResult
from enginecore.request import EngineOutput
from enginecore.scheduler.guesses import Guesses
from enginecore.scheduler.lookahead import Flight, Lookahead
from enginecore.scheduler.pinning import Pinning
from enginecore.scheduler.sequence import Sequence


class Results(Lookahead, Pinning, Guesses):
    """A base of `Scheduler`, which owns what is named here."""

    def _leave(self, sequence: Sequence) -> None:
        raise NotImplementedError

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Book a step's results right away, where none is planned ahead."""
        return self.book(self.depart(plan), result)

    def book(self, flight: Flight, result: StepResult) -> list[EngineOutput]:
        """Book a step's results: append tokens, publish full blocks, finish what is finished. Steps are booked in the
        order in which they departed; rows whose sequence has ended meanwhile have no effect."""
        plan, table, block_size = flight.plan, self.running, self.config.block_size
        self._let_go()
        self._in_flight -= 1
        self._counts.num_steps += 1
        self._time_step(flight.planned_at, plan, result)
        alive_N = self.alive(flight)
        slots = plan.slots_N
        ends = plan.ends_N
        rows, token_ids = np.flatnonzero(plan.samples_N), result.token_ids
        tokens = np.array(token_ids, np.int64)
        all_alive = bool(alive_N.all())
        if not all_alive:
            tokens, rows = tokens[alive_N[rows]], rows[alive_N[rows]]
            token_ids = tokens.tolist()
        taken = self._take_accepted(plan, result, rows, tokens, ends) if result.accepted else {}
        full_N = ends // block_size > plan.starts_N // block_size
        if all_alive:
            table.num_booked_S[slots] = ends
        else:
            table.num_booked_S[slots[alive_N]] = ends[alive_N]
            full_N &= alive_N
        for row, entries in result.prompt_logprobs.items():
            collected = table.sequence(int(slots[row])).prompt_logprobs if alive_N[row] else None
            if collected is not None:
                collected += entries
        for row in np.flatnonzero(full_N).tolist():
            self._publish(int(slots[row]), int(ends[row]))
        if self.tiers is not None:
            self.tiers.submit()

        sampled = slots[rows]
        lengths = ends[rows]
        for slot in sampled[lengths == table.num_prompt_S[sampled]].tolist():
            self.journal.first_token(table.sequence(slot).request_id)
        table.tokens_SL[sampled, lengths] = tokens
        table.ahead_S[sampled] -= 1
        lengths = lengths + 1
        forced, last = result.forced, tokens
        if forced:
            last = self._append_forced(forced, rows, sampled, tokens, lengths)
        self._counts.generation_tokens += len(rows)
        stopped = (table.stop_SX[sampled] == last[:, None]).any(axis=1)
        at_limit = lengths >= table.max_total_S[sampled]
        ended = stopped | at_limit

        if self._num_pending:
            self._release_pending(sampled.tolist())

        if self._groups:
            alone = np.flatnonzero(~table.beam_S[sampled])
            rows, sampled, ended, token_ids = rows[alone], sampled[alone], ended[alone], tokens[alone].tolist()

        # This loop is what a step costs: keep calls out of it.
        sequences, logprobs, errors, many_stops = table.sequences, result.logprobs, result.errors, table.many_stops
        outputs = []
        columns = (rows.tolist(), sampled.tolist(), token_ids, ended.tolist())
        for row, slot, token, done in zip(*columns, strict=True):
            sequence = sequences[slot]
            assert sequence is not None
            output = EngineOutput(sequence.request_id, [token], num_cached_tokens=sequence.num_cached)
            if forced and row in forced:
                output.token_ids += forced[row]
                token = forced[row][-1]
            if taken and row in taken:
                output.token_ids = taken[row]
                token = taken[row][-1]
            if row in logprobs:
                output.logprobs = [logprobs[row], *result.accepted_logprobs.get(row, ())][: len(output.token_ids)]
            if sequence.prompt_logprobs is not None:
                output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            if done or slot in many_stops or row in errors:
                self._finish(sequence, token, row, result, output)
            outputs.append(output)
        if result.guesses:
            self._keep_guesses(slots, {row: ids for row, ids in result.guesses.items() if alive_N[row]})
        if self._groups:
            outputs += self._advance_searches(plan, result)
        return outputs

    def _append_forced(
        self, forced: dict[int, list[int]], rows: IntArray, slots: IntArray, tokens: IntArray, lengths: IntArray
    ) -> IntArray:
        """Append the tokens that follow the chosen ones without being sampled; the next step computes them all.
        Changes `lengths`; returns the last token of each row."""
        last: IntArray = tokens.copy()
        for row, more in forced.items():
            i = int(np.searchsorted(rows, row))
            self.running.tokens_SL[slots[i], lengths[i] : lengths[i] + len(more)] = more
            lengths[i] += len(more)
            self.running.num_tokens_S[slots[i]] += len(more)
            last[i] = more[-1]
            self._counts.generation_tokens += len(more)
            self._counts.grammar_fast_forward += len(more)
        return last

    def _publish(self, slot: int, num_computed: int) -> None:
        block_table = self.running.sequence(slot).table
        if not self.kv.publishes(block_table):
            return
        block_size = self.config.block_size
        start, full = len(block_table.hashes) * block_size, num_computed // block_size * block_size
        fresh: list[int] = self.running.tokens_SL[slot, start:full].tolist() if full > start else []
        stored = self.kv.publish(block_table, fresh, num_computed)
        for i in stored:
            self.kv.note(block_table, i, self._bytes_of(slot, i))
        self._send_down(self.running.sequence(slot), stored)
        if self.events is not None and stored:
            self._record_stored(slot, block_table, stored)

    def _finish(self, sequence: Sequence, token: int, row: int, result: StepResult, output: EngineOutput) -> None:
        """Decide whether and why the sequence ends here, and if it does, let it go."""
        request, slot = sequence.request, sequence.slot
        if row in result.errors:
            output.finish_reason, output.error = "error", result.errors[row]
            self._take_back_token(output)
        elif request.max_tokens == 0:
            output.finish_reason = "length"
            self._take_back_token(output)
        elif token in self.running.stop_SX[slot] or token in self.running.many_stops.get(slot, ()):
            output.finish_reason = "stop"
            ends = not request.params.ignore_eos or request.grammar is not None
            is_eos = ends and token in request.eos_token_ids
            output.stop_reason = None if is_eos else token
        elif self.running.num_known(slot) >= self.running.max_total_S[slot]:
            output.finish_reason = "length"
        else:
            return
        del self._sequences[request.request_id]
        self._settle_account(sequence)
        self._leave(sequence)
        num_generated = len(sequence.token_ids) - sequence.num_prompt - (not output.token_ids)
        self.journal.ended(request.request_id, str(output.finish_reason), num_generated)
        if sequence.family is not None:
            self._part(sequence, sequence.family)

    def _take_back_token(self, output: EngineOutput) -> None:
        output.token_ids, output.logprobs = [], None
        self._counts.generation_tokens -= 1
