"""Whatever is added, stepped and aborted, in pools of the smallest legal size: each one ends with its own tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from enginecore.request import EngineRequest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.scheduler.fake_executor import BAD_TOKEN, Harness, request

MAX_MODEL_LEN = 28
PREFIXES = [[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9, 9], [5] * 17]


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    smallest = -(-MAX_MODEL_LEN // block_size)
    return {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": block_size,
        "num_blocks": smallest + draw(st.sampled_from([0, 0, 1, smallest, 8 * smallest])),
        "max_num_seqs": draw(st.sampled_from([5, 3, 2, 1])),
        "max_num_batched_tokens": draw(st.sampled_from([40, 17, 8, 5, 2, 1])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 8, 3, 1])),
        "prefix_caching": draw(st.sampled_from([True, True, False])),
        "policy": draw(st.sampled_from(["fcfs", "priority", "fair"])),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "copies_blocks": draw(st.sampled_from([True, True, False])),
        "ahead": draw(st.booleans()),
    }


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Everything of a request but its id."""
    prompt = draw(st.sampled_from(PREFIXES)) + draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    if draw(st.sampled_from([False] * 9 + [True])):
        prompt.append(BAD_TOKEN)
    return {
        "prompt": prompt,
        "max_tokens": min(draw(st.sampled_from([24, 16, 8, 3, 1, 0])), MAX_MODEL_LEN - len(prompt)),
        "priority": draw(st.integers(0, 2)),
        "cache_salt": draw(st.sampled_from([None, None, "s"])),
        "tenant": draw(st.sampled_from([None, None, "t"])),
        "adapter": draw(st.sampled_from([None, None, ("s", 0), ("s", 1)])),
        "cached_prompt": draw(st.integers(0, 4)) > 0,
        "eos_token_ids": draw(st.sampled_from([[], [], [3], [30, 4]])),
        "params": {
            "stop_token_ids": draw(st.sampled_from([None, None, [7], [4], list(range(20, 32))])),
            "ignore_eos": draw(st.booleans()),
            "logprobs": draw(st.sampled_from([None, 0])),
            "presence_penalty": draw(st.sampled_from([0.0, 0.0, 0.0, 1.0])),
            "prompt_logprobs": draw(st.sampled_from([None, None, 0])),
        },
    }


def _same_prompt(parent: EngineRequest, max_tokens: int) -> dict[str, Any]:
    """The fields of a request that forks from `parent`."""
    prompt = parent.prompt_token_ids
    return {
        "prompt": prompt, "cache_salt": parent.cache_salt, "adapter": parent.adapter, "fork_of": parent.request_id,
        "max_tokens": min(max_tokens, MAX_MODEL_LEN - len(prompt)),
    }  # fmt: skip


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs())
    def start(self, config: dict[str, Any]) -> None:
        self.harness = Harness(**config)
        self.accepted: dict[str, EngineRequest] = {}
        self.steps = self.allowed_steps = self.work = 0

    @property
    def live(self) -> list[str]:
        return [name for name in self.accepted if not self.harness.finished(name)]

    @rule(several=st.lists(bodies(), min_size=1, max_size=4))
    def add(self, several: list[dict[str, Any]]) -> None:
        for body in several:
            self.add_one(body)

    def add_one(self, body: dict[str, Any]) -> EngineRequest:
        req = request(f"r{len(self.harness.outputs)}", **body)
        self.harness.add(req)
        self.accepted[req.request_id] = req
        # A preempted sequence starts again, at worst once for each other request that comes before it.
        self.work += len(req.prompt_token_ids) + req.max_tokens + 1
        self.allowed_steps += self.work
        return req

    @rule(body=bodies(), others=st.lists(bodies(), min_size=1, max_size=4))
    def add_family(self, body: dict[str, Any], others: list[dict[str, Any]]) -> None:
        """Several sequences of one prompt; what else they ask for is their own."""
        parent = self.add_one(body)
        for other in others:
            self.add_one({**other, **_same_prompt(parent, other["max_tokens"])})

    @precondition(lambda self: self.live)
    @rule(body=bodies(), data=st.data())
    def fork_late(self, body: dict[str, Any], data: st.DataObject) -> None:
        """A fork of anything that is still there, and one that names another prompt's request or none that exists."""
        parent = self.accepted[data.draw(st.sampled_from(self.live))]
        self.add_one({**body, **_same_prompt(parent, body["max_tokens"])})
        self.add_one({**body, "fork_of": data.draw(st.sampled_from([parent.request_id, "unknown"]))})

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.live:
                break
            self.one_step()

    def one_step(self) -> None:
        first = self.harness.scheduler.running.order[:1].tolist()
        plan = self.harness.step()
        any_order = self.harness.config.policy == "fair" or self.harness.ahead
        assert any_order or plan.slots_N.tolist()[:1] == first or not first, "the first in order was not served"
        self.steps += 1
        assert self.steps <= self.allowed_steps, "no end in sight"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(self.live), max_size=3, unique=True))
        assert self.harness.scheduler.abort([*names, "unknown"]) == names
        for name in names:
            del self.accepted[name]
        assert self.harness.scheduler.abort(names) == []

    @precondition(lambda self: self.steps % 5 == 4)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.scheduler.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        scheduler, config = self.harness.scheduler, self.harness.config
        stats = scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.live)
        assert stats.num_running <= config.max_num_seqs
        assert stats.num_used_blocks <= config.num_blocks
        assert 0 <= stats.kv_tokens_held <= stats.kv_slots_held
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert scheduler.has_work() == bool(self.live)
        table = scheduler.running
        keys = [scheduler.waiting.key(table.sequence(slot)) for slot in table.order.tolist()]
        assert keys == sorted(keys)
        if not config.prefix_caching:
            assert scheduler.pool.num_cached == 0

    def teardown(self) -> None:
        while self.live:
            self.one_step()
        for req in self.accepted.values():
            self.harness.check(req)
            for output in self.harness.outputs[req.request_id]:
                hit = output.num_cached_tokens
                assert 0 <= hit < len(req.prompt_token_ids)
                assert hit == 0 or (req.cached_prompt and req.params.prompt_logprobs is None)
        self.harness.check_idle()
        event(f"planned ahead: {self.harness.num_ahead > 0}")
        event(f"forks: {self.harness.scheduler.stats().num_forks > 0}")
        event(f"preempted: {self.harness.scheduler.stats().num_preemptions > 0}")
        event(f"prefix hits: {self.harness.scheduler.stats().prefix_cache_hits > 0}")


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize(("prefix_caching", "ahead"), [(True, True), (True, False), (False, True)])
def test_heavy_traffic_through_the_smallest_legal_pool(
    prefix_caching: bool, ahead: bool, chunk: int, policy: str, block_size: int
) -> None:
    """Volume: hundreds of requests that keep preempting each other, as counters prove, some aborted at random."""
    rng = random.Random(5)
    harness = Harness(
        max_model_len=40, block_size=block_size, num_blocks=40 // block_size, max_num_seqs=6, max_num_batched_tokens=24,
        prefix_caching=prefix_caching, long_prefill_token_threshold=chunk, policy=policy, ahead=ahead,
    )  # fmt: skip
    accepted: dict[str, EngineRequest] = {}
    for i in range(300):
        prompt = rng.choice(PREFIXES) + [rng.randrange(3) for _ in range(rng.randint(1, 10))]
        params = {"prompt_logprobs": rng.choice([None, None, None, 0]), "logprobs": rng.choice([None, 0])}
        body = request(f"r{i}", prompt, rng.randint(0, 13), priority=rng.randrange(3), params=params)
        harness.add(body)
        accepted[body.request_id] = body
        for _ in range(rng.randint(0, 4)):
            if harness.scheduler.has_work():
                harness.step()
        live = [name for name in accepted if not harness.finished(name)]
        if live and rng.random() < 0.1:
            gone = rng.choice(live)
            assert harness.scheduler.abort([gone]) == [gone]
            del accepted[gone]
    harness.run(limit=20_000)
    for body in accepted.values():
        harness.check(body)
    harness.check_idle()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 20 and (harness.num_ahead > 50) == ahead
    assert (stats.prefix_cache_hits > 100) == prefix_caching
