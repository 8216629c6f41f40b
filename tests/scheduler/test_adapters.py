"""Which adapters a batch mixes, who waits for a place, and that their caches do not mix."""

from __future__ import annotations

import pytest
from enginecore.kvcache.events import BlockStored
from enginecore.scheduler import Scheduler
from enginecore.scheduler.adapters import MAX_ASIDE, AdapterPlaces

from tests.scheduler.fake_executor import Harness, request

A, B, C = ("a", 1), ("b", 2), ("c", 3)


def test_the_adapter_that_was_used_longest_ago_gives_its_place() -> None:
    places = AdapterPlaces(2)
    assert places.place(A, []) and places.place(B, [A]) and places.place(A, [])
    assert places.take_placed() == [(0, A), (1, B)]
    assert places.place(C, [A, None])  # B: A has been used since
    assert places.take_placed() == [(1, C)] and places.take_placed() == []
    assert not places.place(B, [A, C])
    assert places.take_placed() == [] and places.num_placed == 3


def test_a_place_is_free_once_its_adapter_is_forgotten() -> None:
    places = AdapterPlaces(1)
    assert places.place(A, [])
    places.forget(A)
    places.forget(B)
    assert places.place(C, []) and places.take_placed() == [(0, C)]


def test_a_batch_holds_so_many_adapters_and_any_number_of_others() -> None:
    """c waits for a or b to end, a's second request waits behind it, and the base model passes both."""
    harness = Harness(max_num_seqs=8, max_loras=2)
    wanted = [("1", A), ("2", B), ("3", C), ("4", A), ("5", None)]
    requests = [
        request(name, [number + 1] * 6, 4 if name != "2" else 9, adapter=key)
        for number, (name, key) in enumerate(wanted)
    ]
    for each in requests:
        harness.add(each)
    batches: list[set[str]] = []
    while harness.scheduler.has_work():
        plan = harness.scheduler.schedule()
        running = [harness.scheduler.running.sequence(slot) for slot in plan.slots_N.tolist()]
        batches.append({sequence.request_id for sequence in running})
        assert len({sequence.request.adapter for sequence in running} - {None}) <= 2
        harness._take(harness.scheduler.update(plan, harness.executor.execute(plan)))
    assert {"1", "2", "5"} in batches and not any({"1", "2", "3"} <= batch for batch in batches)
    first_c = next(index for index, batch in enumerate(batches) if "3" in batch)
    assert not any("4" in batch for batch in batches[:first_c]), "nobody passes one that waits for a place"
    for each in requests:
        harness.check(each)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_more_wait_than_are_looked_past(policy: str) -> None:
    harness = Harness(max_loras=1, policy=policy)
    keys = [("x", 1), *[(f"n{number}", number + 2) for number in range(MAX_ASIDE + 6)]]
    requests = [
        request(f"r{number}", [1, 2, 3], 2, adapter=key, priority=-number) for number, key in enumerate(keys)
    ]  # fmt: skip
    for each in requests:
        harness.add(each)
    harness.run()
    for each in requests:
        harness.check(each)
    assert len(harness.scheduler.waiting) == 0


def test_aborted_while_it_waits_for_a_place() -> None:
    harness = Harness(max_loras=1)
    first, second = request("1", [1, 2, 3], 5, adapter=A), request("2", [1, 2, 3], 5, adapter=B)
    harness.add(first)
    harness.add(second)
    harness.step()
    assert harness.scheduler.num_with_adapter(B) == 1
    assert harness.scheduler.abort(["2"]) == ["2"]
    assert harness.scheduler.num_with_adapter(B) == 0
    harness.run()
    harness.check(first)
    assert harness.scheduler.pool.num_free == 64


def test_events_tell_the_adapter_and_which_load_of_it() -> None:
    harness = Harness(max_loras=1)
    harness.scheduler = Scheduler(harness.config, record_events=True)
    harness.add(request("1", list(range(1, 10)), 1, adapter=B))
    harness.run()
    assert harness.scheduler.events is not None
    stored = [event for event in harness.scheduler.events.take() if isinstance(event, BlockStored)]
    assert stored and all((event.lora_name, event.lora_id) == B for event in stored)
