"""Nobody's batch starves anybody's chat, and nobody is served less than its share."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from enginecore.request import EngineRequest
from enginecore.scheduler.fairness import OUTPUT_WEIGHT, FairShare, fair_budget
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.fake_executor import Harness, request


def fair(**config: Any) -> Harness:
    defaults = {"policy": "fair", "max_num_batched_tokens": 16, "num_blocks": 256, "max_model_len": 128}
    return Harness(**{**defaults, **config})


def steps_until_done(harness: Harness, name: str) -> int:
    for steps in range(1, 2000):
        harness.step()
        if harness.finished(name):
            return steps
    raise AssertionError(f"{name} did not end")


def chat(name: str = "chat", tenant: str = "human", **fields: Any) -> EngineRequest:
    return request(name, [1, 2, 3, 4, 5, 6], 3, tenant=tenant, **fields)


def batch(count: int, length: int = 100, max_tokens: int = 20) -> list[EngineRequest]:
    return [request(f"b{i}", [i % 30] * length, max_tokens, tenant="batch") for i in range(count)]


@pytest.mark.parametrize("late", [0, 1, 5, 40])
def test_a_chat_is_answered_at_once_beside_a_pile_of_long_prompts(late: int) -> None:
    """The budget of a step is 16; before the chat wait 60 prompts of 100 tokens, four of which are being computed."""
    harness = fair()
    harness.add(*batch(60))
    for _ in range(late):
        harness.step()
    harness.add(chat())
    assert steps_until_done(harness, "chat") <= 6
    first = Harness(max_num_batched_tokens=16, num_blocks=256, max_model_len=128)
    first.add(*batch(60))
    for _ in range(late):
        first.step()
    first.add(chat())
    assert steps_until_done(first, "chat") > 100, "first come, first served makes it wait"


def test_a_chat_gets_a_place_when_all_are_taken() -> None:
    """By blocks as well as by slots; what was preempted ends all the same, with its own tokens."""
    for config in ({"max_num_seqs": 4}, {"max_num_seqs": 16, "num_blocks": 64}):
        harness = fair(**config)
        bodies = batch(12, 40, 60)
        harness.add(*bodies)
        for _ in range(30):
            harness.step()
        harness.add(chat())
        assert steps_until_done(harness, "chat") <= 12
        told = [harness.scheduler.journal.explain(body.request_id) for body in bodies]
        assert any(p["by"] == "chat" for each in told if each for p in each["preemptions"])
        harness.run(5000)
        for body in [*bodies, chat()]:
            harness.check(body)
        harness.check_idle()


def test_a_tenant_with_one_sequence_keeps_it() -> None:
    harness = fair(max_num_seqs=1)
    harness.add(request("b", [1] * 8, 30, tenant="batch"))
    for _ in range(5):
        harness.step()
    harness.add(chat())
    harness.run()
    assert harness.scheduler.stats().num_preemptions == 0


def work(harness: Harness, bodies: list[EngineRequest]) -> dict[str, float]:
    """Weighted tokens that each tenant has been given so far."""
    done: dict[str, float] = {}
    for body in bodies:
        outputs = harness.outputs[body.request_id]
        tokens = sum(len(output.token_ids) for output in outputs)
        prompt = len(body.prompt_token_ids) if outputs else 0
        done[str(body.tenant)] = done.get(str(body.tenant), 0) + prompt + OUTPUT_WEIGHT * tokens
    return done


@pytest.mark.parametrize("weights", [(), (("a", 3.0),)])
def test_tenants_that_always_have_work_get_equal_shares(weights: tuple[tuple[str, float], ...]) -> None:
    """Whatever the sizes of their requests: a's are long, b's short, and b sends ten times as many."""
    harness = fair(tenant_weights=weights, prefix_caching=False, max_num_seqs=8)
    rng = random.Random(1)
    bodies = [request(f"a{i}", [rng.randrange(40) for _ in range(60)], 40, tenant="a") for i in range(40)]
    bodies += [request(f"b{i}", [rng.randrange(40) for _ in range(4)], 6, tenant="b") for i in range(400)]
    harness.add(*bodies)
    for _ in range(300):
        harness.step()
    done = work(harness, bodies)
    largest = 8 * (60 + 2 * 40)
    ratio = 3.0 if weights else 1.0
    assert abs(done["a"] / ratio - done["b"]) <= largest, done
    assert min(done.values()) > 2 * largest or weights


def test_idle_time_is_no_claim() -> None:
    share = FairShare()
    share.arrived("busy")
    share.charge("busy", 1000, 0)
    share.arrived("new")
    assert share.counter("new") == share.counter("busy") == 1000
    share.charge("new", 50, 10)
    share.left("new")
    share.charge("busy", 10, 0)
    share.arrived("new")
    assert share.counter("new") == 1070, "what was had is remembered"
    share.left("new")
    share.left("busy")
    share.arrived("later")
    assert share.counter("later") == 1010, "nobody is there: as whoever left last"


def test_cached_tokens_cost_nothing() -> None:
    harness = fair()
    harness.add(request("a", [1] * 64, 1, tenant="a"))
    harness.run()
    share = harness.scheduler.share
    assert share is not None and share.counter("a") == 64 + 2
    harness.add(request("again", [1] * 64, 1, tenant="a"))
    harness.run()
    assert share.counter("a") == 66 + 1 + 1


def test_the_tenant_is_the_salt_where_none_is_named() -> None:
    harness = fair()
    harness.add(request("a", [1, 2], 1, cache_salt="s"), request("b", [1, 2], 1, cache_salt="s", tenant="t"))
    assert harness.scheduler.share is not None and harness.scheduler.share.active == ["s", "t"]
    harness.scheduler.abort(["a", "b"])
    assert harness.scheduler.share.active == []


@given(
    want=st.lists(st.integers(1, 20), max_size=8), yielding=st.lists(st.booleans(), min_size=8, max_size=8),
    budget=st.integers(1, 40), reserve=st.integers(0, 40),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_budget_is_neither_exceeded_nor_left(
    want: list[int], yielding: list[bool], budget: int, reserve: int
) -> None:
    yields = np.array(yielding[: len(want)], np.bool_)
    give = fair_budget(np.array(want, np.int64), yields, budget, reserve)
    assert (give >= 0).all() and (give <= want).all() and give.sum() <= budget
    others = np.array(want)[(np.array(want, np.int64) > 1) & ~yields].sum() if want else 0
    single = want.count(1)
    assert give[np.array(want, np.int64) == 1].sum() == min(single, budget)
    assert give.sum() >= min(budget, single + others)
    assert give.sum() >= min(budget - reserve, sum(want))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_heavy_traffic_of_many_tenants_through_the_smallest_legal_pool(prefix_caching: bool) -> None:
    """Each request ends with its own tokens, whoever has to make way how often."""
    rng = random.Random(3)
    harness = fair(
        max_model_len=40, block_size=4, num_blocks=10, max_num_seqs=5, max_num_batched_tokens=12,
        prefix_caching=prefix_caching,
    )  # fmt: skip
    bodies = []
    for i in range(150):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        tenant = rng.choice(["a", "a", "a", "b", "c"])
        body = request(f"r{i}", prompt, rng.randint(0, 40 - len(prompt)), tenant=tenant)
        harness.add(body)
        bodies.append(body)
        for _ in range(rng.randint(0, 5)):
            if harness.scheduler.has_work():
                harness.step()
    harness.run(20_000)
    for body in bodies:
        harness.check(body)
    harness.check_idle()
    assert harness.scheduler.stats().num_preemptions > 10


def test_no_step_is_empty_while_somebody_can_go_on() -> None:
    """A budget of one token: who gets it finds no block, comes last and makes way; another has to be served then."""
    preempted = 0
    for seed in range(40):
        chance, count = random.Random(seed), 0
        harness = Harness(max_model_len=28, block_size=1, num_blocks=28, max_num_seqs=5, max_num_batched_tokens=1,
                          long_prefill_token_threshold=8, policy="fair", watermark=0.0)  # fmt: skip
        for _ in range(chance.randint(3, 7)):
            for _ in range(chance.randint(1, 4)):
                prompt = [0] * chance.randint(1, 5)
                tenant = chance.choice([None, None, "t"])
                harness.add(request(f"r{count}", prompt=prompt, max_tokens=min(24, 28 - len(prompt)), tenant=tenant))
                count += 1
            for _ in range(chance.randint(1, 6)):
                if harness.scheduler.has_work():
                    harness.step()  # refuses an empty plan
        harness.run(5000)
        preempted += harness.scheduler.stats().num_preemptions
    assert preempted > 20
