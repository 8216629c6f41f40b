"""The persistent batch against a builder that makes the same arrays one number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from enginecore.plan import BeamMove
from enginecore.request import EngineRequest, SamplingParams
from enginecore.runner.batch import PersistentBatch
from enginecore.scheduler import NewRequest, StepPlan
from hypothesis import given, settings
from hypothesis import strategies as st

MAX_SEQS, MAX_LEN = 4, 40


def request(name: str, prompt: list[int], prompt_logprobs: int | None = None) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(prompt_logprobs=prompt_logprobs), 16)


def plan(rows: list[tuple[int, int, int, bool]], new: Sequence[Any] = (), updates: Sequence[Any] = ()) -> StepPlan:
    columns = list(zip(*rows, strict=True))
    return StepPlan(
        slots_N=np.array(columns[0], np.int64),
        starts_N=np.array(columns[1], np.int64),
        num_new_N=np.array(columns[2], np.int64),
        samples_N=np.array(columns[3], np.bool_),
        new=list(new),
        block_updates=list(updates),
    )


@dataclass
class Seq:
    request: EngineRequest
    num_prompt: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    owed_from: int | None = None


def slow_inputs(seqs: dict[int, Seq], step: StepPlan, size: int) -> dict[str, list[Any]]:
    """What the step's arrays must be, row by row and token by token."""
    out: dict[str, list[Any]] = {
        "token_ids": [], "positions": [], "query_start_loc": [0], "seq_lens": [], "slot_mapping": [], "request_ids": [],
        "last": [], "prompt": [], "prompt_rows": [], "tables": [],
    }  # fmt: skip
    for row in range(len(step.slots_N)):
        seq = seqs[int(step.slots_N[row])]
        begin = len(out["token_ids"])
        start, count = int(step.starts_N[row]), int(step.num_new_N[row])
        wanted = []
        for position in range(start, start + count):
            at = len(out["token_ids"])
            out["token_ids"].append(seq.tokens[position])
            out["positions"].append(position)
            out["slot_mapping"].append(seq.blocks[position // size] * size + position % size)
            if seq.owed_from is not None and seq.owed_from <= position + 1 < seq.num_prompt:
                wanted.append(at)
        out["query_start_loc"].append(begin + count)
        out["seq_lens"].append(start + count)
        out["request_ids"].append(seq.request.request_id)
        out["tables"].append(seq.blocks)
        if step.samples_N[row]:
            out["last"].append(begin + count - 1)
        if wanted:
            out["prompt"] += wanted
            out["prompt_rows"].append((row, start + wanted[0] - begin + 1, len(wanted)))
    return out


def compare(batch: PersistentBatch, seqs: dict[int, Seq], step: StepPlan) -> None:
    inputs, want = batch.inputs(step), slow_inputs(seqs, step, batch.block_size)
    got = inputs.batch
    for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping"):
        assert getattr(got, name).tolist() == want[name], name
    assert got.request_ids == want["request_ids"]
    assert got.logits_indices.tolist() == want["last"] + want["prompt"]
    assert inputs.prompt_rows == want["prompt_rows"]
    assert inputs.sample_rows == np.flatnonzero(step.samples_N).tolist()
    for row, blocks in enumerate(want["tables"]):
        used = -(-want["seq_lens"][row] // batch.block_size)
        assert got.block_table.shape[1] >= used and got.block_table[row, :used].tolist() == blocks[:used]
    dtypes = {name: getattr(got, name).dtype for name in ("token_ids", "positions", "slot_mapping", "logits_indices")}
    assert set(dtypes.values()) == {np.dtype(np.int64)}, dtypes
    for name in ("query_start_loc", "seq_lens", "block_table"):
        assert getattr(got, name).dtype == np.int32, name


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 4, 16]))
def test_random_steps(data: st.DataObject, size: int) -> None:
    """Sequences enter, are computed in chunks, decode, leave without a word, and enter again as after preemption."""
    batch = PersistentBatch(MAX_SEQS, MAX_LEN, size)
    seqs: dict[int, Seq] = {}
    blocks = iter(data.draw(st.permutations(range(400))))
    for number in range(data.draw(st.integers(1, 12))):
        new, updates, rows = [], [], []
        for slot in data.draw(st.permutations(range(MAX_SEQS))):
            seq = seqs.get(slot)
            if seq is None or data.draw(st.integers(0, 4)) == 0:
                prompt = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=20))
                output = data.draw(st.sampled_from([[], [], [100, 101]]))
                owed = data.draw(st.sampled_from([None, 0]))
                req = request(f"{number}-{slot}", prompt, owed)
                seq = seqs[slot] = Seq(req, len(prompt), prompt + output, owed_from=None if owed is None else 1)
                new.append(NewRequest(slot, req, list(seq.tokens), len(prompt), 0, owed))
            left = len(seq.tokens) - seq.computed
            count = data.draw(st.integers(0 if not (new and new[-1].slot == slot) else 1, left))
            if not count or len(seq.tokens) >= MAX_LEN:
                continue
            needed = -(-(seq.computed + count) // size)
            if needed > len(seq.blocks):
                fresh = [next(blocks) for _ in range(needed - len(seq.blocks))]
                updates.append((slot, len(seq.blocks), fresh))
                seq.blocks += fresh
            rows.append((slot, seq.computed, count, seq.computed + count == len(seq.tokens)))
        if not rows:
            continue
        step = plan(rows, new, updates)
        batch.apply(step)
        compare(batch, seqs, step)
        sampled = [row for row in rows if row[3]]
        tokens = [200 + number + i for i in range(len(sampled))]
        positions = np.array([row[1] + row[2] for row in sampled], np.int64)
        batch.append(np.array([row[0] for row in sampled], np.int64), positions, tokens)
        for slot, start, count, _ in rows:
            seqs[slot].computed = start + count
        for row, token in zip(sampled, tokens, strict=True):
            seqs[row[0]].tokens.append(token)


def test_prompt_logprobs_are_owed_once() -> None:
    batch = PersistentBatch(2, 16, 4)
    req = request("a", [5, 6, 7, 8], 0)
    new = NewRequest(0, req, [5, 6, 7, 8], 4, 0, 0)
    first = plan([(0, 0, 2, False)], [new], [(0, 0, [3])])
    batch.apply(first)
    assert batch.inputs(first).prompt_rows == [(0, 1, 2)]
    second = plan([(0, 2, 2, True)])
    inputs = batch.inputs(second)
    assert inputs.prompt_rows == [(0, 3, 1)] and inputs.batch.logits_indices.tolist() == [1, 0]
    batch.append(np.array([0]), np.array([4]), [9])
    assert batch.inputs(plan([(0, 4, 1, True)])).prompt_rows == [] and not batch.prompt_logprobs_at


@pytest.mark.parametrize("prompt", [[5], [5, 6]])
def test_a_prompt_of_one_token_has_no_log_probabilities(prompt: list[int]) -> None:
    batch = PersistentBatch(1, 16, 4)
    new = NewRequest(0, request("a", prompt, 0), prompt, len(prompt), 0, 0)
    step = plan([(0, 0, len(prompt), True)], [new], [(0, 0, [1])])
    batch.apply(step)
    inputs = batch.inputs(step)
    assert inputs.prompt_rows == ([] if len(prompt) == 1 else [(0, 1, 1)])


def test_an_empty_slot_is_an_error() -> None:
    with pytest.raises(AssertionError, match="slot 1 is empty"):
        PersistentBatch(2, 16, 4).request(1)


def test_a_token_in_a_shared_block_is_computed_without_being_written() -> None:
    batch = PersistentBatch(MAX_SEQS, MAX_LEN, 4)
    new = [NewRequest(1, request("a", list(range(8))), list(range(8)), 8, 0, None, write_from=8)]
    first = plan([(1, 7, 1, True)], new, [(1, 0, [5, 6])])
    batch.apply(first)
    assert batch.inputs(first).batch.slot_mapping.tolist() == [-1]
    batch.append(np.array([1]), np.array([8]), [99])
    second = plan([(1, 8, 1, True)], updates=[(1, 2, [7])])
    batch.apply(second)
    assert batch.inputs(second).batch.slot_mapping.tolist() == [7 * 4], "only the first step is special"


def test_beams_take_over_tokens_and_blocks_all_at_once() -> None:
    batch = PersistentBatch(MAX_SEQS, MAX_LEN, 4)
    new = [NewRequest(slot, request("a", [1, 2]), [1, 2, 10 + slot, 20 + slot], 2, 0, None) for slot in range(3)]
    batch.apply(plan([(0, 3, 1, True)], new, [(slot, 0, [slot]) for slot in range(3)]))
    moved = plan([(slot, 4, 1, True) for slot in range(3)], updates=[(slot, 1, [10 + slot]) for slot in range(3)])
    move = BeamMove(np.array([0, 1, 2]), np.array([1, 0, 0]), 4, [7, 8, 9])
    batch.apply(replace(moved, moves=[move]))
    assert batch.tokens_SL[:3, :5].tolist() == [[1, 2, 11, 21, 7], [1, 2, 10, 20, 8], [1, 2, 10, 20, 9]]
    assert batch.block_table_SB[:3, :2].tolist() == [[1, 10], [0, 11], [0, 12]]
