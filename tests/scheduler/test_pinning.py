"""Prefixes that stay: by request and by operator; what runs comes first."""

from __future__ import annotations

from typing import Any

from enginecore.scheduler import Scheduler
from enginecore.scheduler.journal import Journal

from tests.scheduler.fake_executor import Harness, request

PROMPT = list(range(1, 34))


def harness_at(now: list[float], **config: Any) -> Harness:
    harness = Harness(**{"num_blocks": 32, "max_num_seqs": 1, **config})
    harness.scheduler = Scheduler(harness.config, Journal(clock=lambda: now[0]))
    return harness


def cached(harness: Harness, name: str, **fields: Any) -> int:
    body = request(name, PROMPT, 1, **fields)
    harness.add(body)
    harness.run()
    harness.check(body)
    return harness.outputs[name][0].num_cached_tokens


def flood(harness: Harness, name: str) -> None:
    for i in range(2):
        harness.add(request(f"{name}{i}", [39 - i] * 63, 1))
    harness.run()


def test_a_request_keeps_its_prefix_for_a_time_that_each_use_begins_anew() -> None:
    now = [0.0]
    harness = harness_at(now)
    pin = {"pin_prefix": (18, 300.0)}
    cached(harness, "a", **pin)
    flood(harness, "f")
    now[0] = 250.0
    assert cached(harness, "b", **pin) == 16, "of 18 tokens, the full blocks"
    flood(harness, "g")
    now[0] = 500.0
    assert cached(harness, "c") == 16
    flood(harness, "h")
    now[0] = 551.0
    flood(harness, "i")
    assert cached(harness, "d") == 0, "its time is over"
    assert harness.scheduler.list_pins() == []


def test_pins_of_one_salt_hold_nothing_of_another() -> None:
    now = [0.0]
    harness = harness_at(now)
    assert harness.scheduler.pin("mine", PROMPT, 60.0, "s") is not None
    for salt in ("s", None):
        cached(harness, f"a{salt}", cache_salt=salt)
    flood(harness, "f")
    assert cached(harness, "as2", cache_salt="s") == 32 and cached(harness, "a2") == 0


def test_operators_pin_before_and_after_and_look() -> None:
    now = [0.0]
    harness = harness_at(now)
    told = harness.scheduler.pin("system", PROMPT, 60.0)
    assert told == {"id": "system", "tokens": 32, "blocks": 8, "cached_blocks": 0, "seconds_left": 60.0}
    cached(harness, "a")
    now[0] = 10.0
    assert harness.scheduler.list_pins() == [{**told, "cached_blocks": 8, "seconds_left": 50.0}]
    assert harness.scheduler.pin("more", list(range(40)), 60.0) is None, "more than half of the cache"
    assert harness.scheduler.unpin("system") and not harness.scheduler.unpin("system")
    flood(harness, "f")
    assert cached(harness, "b") == 0


def test_a_pin_keeps_nobody_from_running() -> None:
    now = [0.0]
    harness = harness_at(now, num_blocks=16)
    cached(harness, "a", pin_prefix=(33, 60.0))
    body = request("big", [7] * 50, 14)
    harness.add(body)
    harness.run()
    harness.check(body)
    assert harness.scheduler.stats().num_preemptions == 0


def test_floors_and_caps_of_tenants() -> None:
    now = [0.0]
    harness = harness_at(now, tenant_cache_floor=0.25, tenant_cache_cap=0.5)
    cached(harness, "a", tenant="small")
    for i in range(4):
        harness.add(request(f"f{i}", [39 - i] * 63, 1, tenant="big"))
        harness.run()
    assert harness.scheduler.pool.num_cached <= 16 + 8, "the cap of the big one, and what the small one has"
    assert cached(harness, "b", tenant="small") == 32
    plain = harness_at(now)
    cached(plain, "a", tenant="small")
    for i in range(4):
        plain.add(request(f"f{i}", [39 - i] * 63, 1, tenant="big"))
        plain.run()
    assert cached(plain, "b", tenant="small") == 0
