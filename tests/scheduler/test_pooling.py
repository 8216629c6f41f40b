"""Texts for pooling: whole ones, in order, within a step's tokens and rows."""

from __future__ import annotations

from typing import Any

from enginecore.pooling import PoolingParams
from enginecore.request import EngineRequest, SamplingParams
from enginecore.scheduler.pooling import PoolingScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS: dict[str, Any] = {
    "max_rows": 4,
    "max_tokens": 20,
    "max_model_len": 16,
    "policy": "fcfs",
    "tenant_weights": {},
}


def request(name: str, length: int, **fields: Any) -> EngineRequest:
    return EngineRequest(name, [1] * length, SamplingParams(max_tokens=0), 0, pooling=PoolingParams(), **fields)


def names(batch: list[EngineRequest]) -> list[str]:
    return [each.request_id for each in batch]


def done(scheduler: PoolingScheduler, batch: list[EngineRequest]) -> None:
    scheduler.finish(batch, ["stop"] * len(batch))


def test_a_step_takes_whole_texts_in_order_until_one_does_not_fit() -> None:
    scheduler = PoolingScheduler(**SETTINGS)
    for name, length in (("a", 10), ("b", 8), ("c", 3), ("d", 1)):
        assert scheduler.add(request(name, length)) is None
    first = scheduler.schedule()
    assert names(first) == ["a", "b"], "c does not fit, and d does not overtake it"
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 2)
    done(scheduler, first)
    second = scheduler.schedule()
    assert names(second) == ["c", "d"]
    done(scheduler, second)
    assert not scheduler.has_work() and scheduler.stats().prompt_tokens == 22
    told = scheduler.journal.explain("c")
    assert told is not None and told["queued"]["steps_by_reason"] == {"token budget": 1} and told["state"] == "ended"


def test_rows_are_bounded_and_the_longest_text_always_fits() -> None:
    scheduler = PoolingScheduler(**{**SETTINGS, "max_tokens": 4})
    for i in range(6):
        scheduler.add(request(str(i), 3))
    scheduler.add(request("long", 16))
    seen = []
    while scheduler.has_work():
        batch = scheduler.schedule()
        assert sum(len(each.prompt_token_ids) for each in batch) <= 16
        done(scheduler, batch)
        seen.append(names(batch))
    assert seen == [["0", "1", "2", "3"], ["4", "5"], ["long"]]


def test_what_can_never_run_is_refused() -> None:
    scheduler = PoolingScheduler(**SETTINGS)
    assert scheduler.add(request("a", 3)) is None
    assert "already" in str(scheduler.add(request("a", 3)))
    assert "empty" in str(scheduler.add(request("b", 0)))
    assert "max_model_len" in str(scheduler.add(request("c", 17)))
    generating = EngineRequest("d", [1], SamplingParams(), 5)
    assert "no text" in str(scheduler.add(generating))


def test_priority_and_fairness_order_the_queue() -> None:
    scheduler = PoolingScheduler(**{**SETTINGS, "policy": "priority", "max_rows": 1})
    for name, priority in (("late", 5), ("soon", -1)):
        scheduler.add(request(name, 2, priority=priority))
    assert names(scheduler.schedule()) == ["soon"]
    fair = PoolingScheduler(**{**SETTINGS, "policy": "fair", "max_rows": 1})
    for i in range(3):
        fair.add(request(f"pile{i}", 8, tenant="pile"))
    fair.add(request("single", 8, tenant="single"))
    order = []
    while fair.has_work():
        batch = fair.schedule()
        done(fair, batch)
        order += names(batch)
    assert order == ["pile0", "single", "pile1", "pile2"]


@given(
    st.lists(
        st.one_of(st.tuples(st.just("add"), st.integers(1, 16)), st.tuples(st.just("abort"), st.integers(0, 30)),
                  st.tuples(st.just("step"), st.just(0))),
        max_size=60,
    )
)  # fmt: skip
@settings(max_examples=40)
def test_every_text_ends_once(events: list[tuple[str, int]]) -> None:
    scheduler = PoolingScheduler(**SETTINGS)
    added, ended = 0, []
    for kind, value in [*events, *[("step", 0)] * 60]:
        if kind == "add":
            assert scheduler.add(request(str(added), value)) is None
            added += 1
        elif kind == "abort":
            ended += scheduler.abort([str(value)])
        elif scheduler.has_work():
            batch = scheduler.schedule()
            assert batch and len(batch) <= 4 and sum(len(each.prompt_token_ids) for each in batch) <= 20
            done(scheduler, batch)
            ended += names(batch)
    assert sorted(ended, key=int) == [str(i) for i in range(added)] and not scheduler.has_work()
    assert scheduler.stats().num_waiting == scheduler.stats().num_running == 0
