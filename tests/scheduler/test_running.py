"""The running table: rows, order and stop tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from enginecore.scheduler.running import STOP_COLUMNS, RunningTable
from enginecore.scheduler.sequence import Sequence

from tests.scheduler.fake_executor import request


def sequence(arrival: int, prompt: list[int], **fields: Any) -> Sequence:
    return Sequence(request(f"r{arrival}", prompt, **fields), arrival, seed=0)


def test_enter_and_leave_keep_the_tokens() -> None:
    table = RunningTable(2, 8)
    one = sequence(1, [5, 6, 7], max_tokens=4)
    slot = table.enter(one, (0, 1), 2)
    assert (table.num_tokens_S[slot], table.num_computed_S[slot], table.max_total_S[slot]) == (3, 2, 7)
    table.tokens_SL[slot, 3] = 9
    table.num_tokens_S[slot] = 4
    table.leave(one, (0, 1))
    assert one.token_ids == [5, 6, 7, 9] and one.slot == -1 and one.request.prompt_token_ids == [5, 6, 7]
    with pytest.raises(AssertionError):
        table.sequence(slot)


def test_the_longest_sequence_has_room_for_one_token_more() -> None:
    """max_tokens 0: a token is sampled (and thrown away) behind a prompt that fills the model's length."""
    table = RunningTable(1, 4)
    slot = table.enter(sequence(1, [1, 2, 3, 4], max_tokens=0), (0, 1), 0)
    table.tokens_SL[slot, 4] = 7


def test_order_follows_keys_whatever_the_slots() -> None:
    rng, table, model = random.Random(2), RunningTable(8, 4), {}
    for arrival in range(500):
        if table.has_free_slot and rng.random() < 0.6:
            one, key = sequence(arrival, [1]), (rng.randrange(3), arrival)
            table.enter(one, key, 0)
            model[key] = one
        elif model:
            key = rng.choice(list(model))
            table.leave(model.pop(key), key)
        assert [table.sequence(slot) for slot in table.order.tolist()] == [model[key] for key in sorted(model)]
        assert len(table) == len(model) and table.has_free_slot == (len(model) < 8)


@pytest.mark.parametrize("count", [0, 1, STOP_COLUMNS, STOP_COLUMNS + 1, 50])
def test_stop_tokens(count: int) -> None:
    table = RunningTable(1, 4)
    slot = table.enter(sequence(1, [1], params={"stop_token_ids": list(range(count))}), (0, 1), 0)
    columns = [token for token in table.stop_SX[slot].tolist() if token >= 0]
    many = table.many_stops.get(slot, frozenset())
    assert set(columns) | many == set(range(count)) and (not many or not columns)


def test_a_slot_keeps_no_stop_tokens_of_its_last_owner() -> None:
    table = RunningTable(1, 4)
    for stops in (list(range(20)), [1, 2, 3], []):
        one = sequence(1, [1], params={"stop_token_ids": stops}, eos_token_ids=[9])
        slot = table.enter(one, (0, 1), 0)
        known = {*table.stop_SX[slot].tolist(), *table.many_stops.get(slot, ())} - {-1}
        assert known == {*stops, 9}
        table.leave(one, (0, 1))
    one = sequence(1, [1], params={"ignore_eos": True}, eos_token_ids=[9])
    assert (table.stop_SX[table.enter(one, (0, 1), 0)] == -1).all()
