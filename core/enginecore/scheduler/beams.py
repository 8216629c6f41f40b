"""The scheduler's part that runs beam searches.

A search is a group of sequences. Its root computes the prompt in one slot while the other `width - 1` are kept free for
it; then the group splits into `width` sequences that share all blocks and run in step: in a plan either each has a row,
with the same number of tokens, or none has. After each of their steps the best continuations are chosen
(`beam_search.py`), and a beam takes over the table of its parent; the block that it writes to next is copied when
another beam has it too. So what beams have in common is computed once and held once.

A preempted group waits as its root again, with the tokens that all its beams begin with, and splits when these are
computed.
"""

from __future__ import annotations

import msgspec
import numpy as np

from enginecore.kvcache import BlockTable
from enginecore.plan import BeamMove, IntArray, NewRequest, StepPlan, StepResult
from enginecore.request import EngineOutput, EngineRequest, EngineStats
from enginecore.scheduler.beam_search import BeamSearch, num_candidates
from enginecore.scheduler.fairness import Fairness
from enginecore.scheduler.sequence import Sequence


class BeamGroup:
    """One search. `root` is the sequence that was added and the first of the `members`, which are in `slots`."""

    __slots__ = ("entering", "members", "move", "reserved", "resume", "root", "search", "slots", "split", "width")

    def __init__(self, root: Sequence, search: BeamSearch, width: int) -> None:
        self.root, self.search, self.width = root, search, width
        self.members = [root]
        self.slots: list[int] = []
        #: Slots kept free while the root runs alone.
        self.reserved: list[int] = []
        self.split = False
        #: The beams' tokens while they are not in slots.
        self.resume: list[list[int]] | None = None
        #: What the runner has to be told with the group's next rows: that its sequences are new, or who follows whom.
        self.entering = False
        self.move: BeamMove | None = None


class Beams(Fairness):
    """A base of `Scheduler`, which owns what is named here."""

    _groups: dict[str, BeamGroup]
    _counts: EngineStats

    # ---- in and out ----------------------------------------------------------------------------------------------

    def _begin_search(self, sequence: Sequence) -> str | None:
        """Make a group of a new sequence; returns why it can never run."""
        request, config = sequence.request, self.config
        options = request.params.beam
        assert options is not None
        if not config.copies_blocks:
            return "beam search needs a device that copies KV blocks, and this one does not"
        limits = (("max_num_seqs", config.max_num_seqs), ("max_num_batched_tokens", config.max_num_batched_tokens))
        for name, limit in limits:
            if options.width > limit:
                return f"beam_width {options.width} is more than {name} {limit}"
        stops: dict[int, int | None] = {token: token for token in request.params.stop_token_ids or ()}
        if not request.params.ignore_eos:
            stops.update(dict.fromkeys(request.eos_token_ids))
        search = BeamSearch(options, stops, request.max_tokens, request.params.logprobs)
        sequence.group = BeamGroup(sequence, search, options.width)
        needed = max(num_candidates(options.width, len(stops)), request.params.logprobs or 0)
        params = msgspec.structs.replace(request.params, logprobs=needed, temperature=0)
        sequence.request = msgspec.structs.replace(request, params=params)
        self._groups[sequence.request_id] = sequence.group
        return None

    def _most_blocks(self, request: EngineRequest) -> int:
        """The most blocks that a request can hold at once: all but the prompt's full ones once for each beam."""
        num_prompt = len(request.prompt_token_ids)
        whole = self.kv.blocks_for(max(num_prompt + request.max_tokens - 1, num_prompt))
        shared = num_prompt // self.config.block_size
        return shared + (request.params.beam.width if request.params.beam else 1) * (whole - shared)

    def _blocks_beside_root(self, group: BeamGroup) -> int:
        """Blocks that the beams need on top of their root's, when they split."""
        root, kv = group.root, self.kv
        common = len(root.token_ids) if root.slot < 0 else int(self.running.num_tokens_S[root.slot])
        length = len(group.resume[0]) if group.resume is not None else root.num_prompt + 1
        length = min(length, root.num_prompt + root.request.max_tokens - 1)
        shared = common // kv.block_size
        return max(0, group.width * (kv.blocks_for(length) - shared) - (kv.blocks_for(common) - shared))

    def _owed_to_searches(self) -> int:
        """Blocks that running groups need when they split."""
        return sum(
            self._blocks_beside_root(group)
            for group in self._groups.values()
            if group.root.slot >= 0 and not group.split
        )

    def _leave_together(self, group: BeamGroup) -> None:
        """Take all of a group's slots and blocks. Its beams' tokens stay, for when it comes again."""
        for member in group.members:
            self.running.leave(member, self.waiting.key(member))
            self.kv.free(member.table)
        if group.split:
            group.resume = [member.token_ids for member in group.members]
        else:
            self.running.unreserve(group.reserved)
        group.reserved, group.slots, group.split, group.entering, group.move = [], [], False, False, None
        root = group.root
        group.members = [root]
        if group.resume is not None:
            root.token_ids = _common_start(group.resume)
        hashes = root.table.hashes[: len(root.token_ids) // self.config.block_size]
        root.table = BlockTable(root.table.root, hashes=hashes, tenant=root.tenant)

    # ---- a step's plan -------------------------------------------------------------------------------------------

    def _in_step(self, slots: IntArray, give: IntArray) -> IntArray:
        """The same number of tokens for each beam of a group; the remainder of a short budget goes to nobody."""
        places = {int(slot): row for row, slot in enumerate(slots.tolist())}
        for group in self._groups.values():
            if group.split:
                rows = [places[slot] for slot in group.slots]
                give[rows] = give[rows].sum() // group.width
        return give

    def _own_tail(
        self, sequence: Sequence, copies: list[tuple[int, int, int]], updates: list[tuple[int, int, list[int]]]
    ) -> bool:
        """Before a beam writes: its own copy of a block that others have too. False when there is no block for it."""
        slot = sequence.slot
        at = int(self.running.num_computed_S[slot])
        pairs = self.kv.make_writable(sequence.table, at, at)
        if pairs is None:
            return False
        for index, source, target in pairs:
            copies.append((slot, source, target))
            updates.append((slot, index, [target]))
        return True

    def _announce(
        self, slots: IntArray, new: list[NewRequest], updates: list[tuple[int, int, list[int]]]
    ) -> list[BeamMove]:
        """What the runner must know before these slots' rows: beams that enter, and who takes over whose tokens."""
        planned, moves = set(slots.tolist()), []
        for group in self._groups.values():
            if not group.split or group.slots[0] not in planned:
                continue
            if group.entering:
                group.entering = False
                updates[:] = [update for update in updates if update[0] not in group.slots]
                for member, slot in zip(group.members, group.slots, strict=True):
                    tokens = self.running.tokens(slot)
                    new.append(NewRequest(slot, member.request, tokens, member.num_prompt, member.seed, None))
                    updates.append((slot, 0, list(member.table.blocks)))
            elif group.move is not None:
                moves.append(group.move)
            group.move = None
        return moves

    # ---- a step's results ----------------------------------------------------------------------------------------

    def _advance_searches(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Let every group whose rows have sampled take its next step; the outputs of those that are over."""
        rows = dict(zip(plan.slots_N.tolist(), range(len(plan.slots_N)), strict=True))
        outputs = []
        for group in list(self._groups.values()):
            slots = group.slots if group.split else [group.root.slot]
            if slots[0] not in rows or not plan.samples_N[rows[slots[0]]]:
                continue
            own = [rows[slot] for slot in slots]
            problem = next((result.errors[row] for row in own if row in result.errors), None)
            if problem is not None:
                outputs.append(self._end_search(group, "error", error=problem))
            elif not group.split and group.resume is not None:
                self._split(group, group.resume)
            else:
                going = group.search.advance([result.logprobs[row] for row in own])
                if going is None:
                    outputs.append(self._end_search(group, group.search.answers()[0].finish_reason))
                elif group.split:
                    self._follow(group, *going)
                else:
                    self._split(group, [[*group.root.request.prompt_token_ids, token] for token in going[1]])
        return outputs

    def _end_search(self, group: BeamGroup, reason: str, error: str | None = None) -> EngineOutput:
        root = group.root
        output = EngineOutput(root.request_id, [], num_cached_tokens=root.num_cached)
        output.finish_reason, output.error = reason, error
        if error is None:
            output.beams = group.search.answers()
        del self._sequences[root.request_id], self._groups[root.request_id]
        self._settle_account(root)
        self._leave_together(group)
        self.journal.ended(root.request_id, reason, group.search.num_tokens)
        return output

    def _split(self, group: BeamGroup, beams: list[list[int]]) -> None:
        """From the root, which has computed what `beams` begin with, to one sequence for each of them."""
        root, key = group.root, self.waiting.key(group.root)
        slot, computed = root.slot, int(self.running.num_computed_S[root.slot])
        group.slots, group.reserved = [slot, *group.reserved], []
        self.running.leave(root, key, keep_slot=True)
        root.table.hashes = root.table.hashes[: computed // self.config.block_size]
        tables = [root.table] + [self.kv.fork(root.table) for _ in beams[1:]]
        group.members = [root] + [Sequence(root.request, root.arrival, root.seed) for _ in beams[1:]]
        for member, table, tokens, own in zip(group.members, tables, beams, group.slots, strict=True):
            member.group, member.table, member.token_ids = group, table, tokens
            self.running.enter(member, key, computed, slot=own)
        self._counts.num_forks += group.width - 1
        self._counts.forked_tokens += (group.width - 1) * computed
        group.split, group.entering, group.resume = True, True, None

    def _follow(self, group: BeamGroup, parents: list[int], tokens: list[int]) -> None:
        """Beam i goes on as its parent did, with a token of its own. The row of each holds a sampled token already, in
        whose place it comes."""
        table, slots = self.running, np.array(group.slots)
        sources, last = slots[parents], int(table.num_tokens_S[slots[0]]) - 1
        start = group.root.num_prompt
        table.tokens_SL[slots, start:last] = table.tokens_SL[sources, start:last]
        table.tokens_SL[slots, last] = tokens
        old = [member.table for member in group.members]
        taken: set[int] = set()
        for member, parent in zip(group.members, parents, strict=True):
            member.table = self.kv.fork(old[parent]) if parent in taken else old[parent]
            taken.add(parent)
        for index, block_table in enumerate(old):
            if index not in taken:
                self.kv.free(block_table)
        group.move = BeamMove(slots, sources, last, tokens)


def _common_start(beams: list[list[int]]) -> list[int]:
    """The tokens that all beams begin with, at most all but their last."""
    low, high = min(beams), max(beams)
    count = next((i for i, pair in enumerate(zip(low, high, strict=True)) if pair[0] != pair[1]), len(low) - 1)
    return low[:count]
