"""Prefixes that come back from host memory and disk: right tokens, nothing lost, nobody kept waiting by others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from enginecore.kvcache import BlockTable, root_hash
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineRequest

from tests.scheduler.fake_executor import request
from tests.scheduler.test_scheduler_properties import PREFIXES
from tests.scheduler.tier_harness import PAGE, TierHarness

PROMPT = list(range(1, 34))


def flood(harness: TierHarness) -> None:
    """Other prompts that take every block of the device."""
    for i in range(2):
        harness.add(request(f"flood{i}", [39 - i] * (harness.config.max_model_len - 1), 1))
        harness.run()


def warm(host_slots: int = 64, folder: Path | None = None, **config: Any) -> TierHarness:
    """PROMPT was computed and has left the device."""
    harness = TierHarness(host_slots, folder, **{"num_blocks": 16, **config})
    first = request("first", PROMPT, 2)
    harness.add(first)
    harness.run()
    harness.settle()
    flood(harness)
    harness.settle()
    assert harness.scheduler.kv.match(BlockTable(root_hash()), PROMPT) == 0
    harness.check(first)
    return harness


def test_a_prefix_comes_back_from_host_memory() -> None:
    harness = warm()
    again = request("again", PROMPT, 3)
    harness.add(again)
    harness.run()
    harness.check(again)
    assert harness.outputs["again"][0].num_cached_tokens == 32
    stats = harness.scheduler.stats()
    assert (stats.lifted_tokens, stats.fetched_tokens) == (32, 0)
    told = harness.scheduler.journal.explain("again")
    assert told is not None
    (move,) = told["transfers"]
    assert (move["from"], move["blocks"], move["arrived"]) == ("host", 8, 8)
    assert told["prefill"]["reused_tokens"] == 32
    harness.settle()
    harness.check_idle()


def test_others_go_on_while_blocks_come_up() -> None:
    harness = warm(num_blocks=20)
    harness._chance = 0.0
    slow, other = request("slow", PROMPT, 2), request("other", [3, 2, 1], 3)
    harness.add(slow, other)
    for _ in range(3):
        harness.step()
    assert harness.finished("other") and not harness.outputs["slow"]
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 1)
    harness._chance = 1.0
    harness.run()
    harness.check(slow)
    harness.check(other)
    queued = (harness.scheduler.journal.explain("slow") or {})["queued"]
    assert queued["steps_by_reason"]["blocks on their way from a lower tier"] >= 2


def test_a_salt_finds_nothing_of_another(tmp_path: Path) -> None:
    harness = warm(folder=tmp_path)
    for salt, hit in (("s", 0), ("t", 0), (None, 32)):
        body = request(f"r{salt}", PROMPT, 2, cache_salt=salt)
        harness.add(body)
        harness.run()
        harness.check(body)
        assert harness.outputs[f"r{salt}"][0].num_cached_tokens == hit
        assert (harness.scheduler.journal.explain(f"r{salt}") or {})["transfers"] == [] or salt is None


@pytest.mark.parametrize("field", [{"cached_prompt": False}, {"params": {"prompt_logprobs": 0}}])
def test_who_does_not_read_the_cache_waits_for_nothing(field: dict[str, Any]) -> None:
    harness = warm()
    body = request("a", PROMPT, 2, **field)
    harness.add(body)
    harness.run()
    harness.check(body)
    assert harness.scheduler.stats().lifted_tokens == 0


def test_a_restart_finds_its_prefixes_on_disk(tmp_path: Path) -> None:
    harness = warm(folder=tmp_path)
    assert harness.scheduler.stats().disk_blocks > 8
    fresh = TierHarness(64, tmp_path, num_blocks=16)
    body = request("again", PROMPT, 3)
    fresh.add(body)
    fresh.run()
    fresh.check(body)
    stats = fresh.scheduler.stats()
    assert (stats.fetched_tokens, stats.lifted_tokens) == (32, 32)
    assert fresh.outputs["again"][0].num_cached_tokens == 32
    told = fresh.scheduler.journal.explain("again")
    assert told is not None and [move["from"] for move in told["transfers"]] == ["disk", "host"]


@pytest.mark.parametrize("harm", ["delete", "truncate", "corrupt", "swap"])
@pytest.mark.parametrize("victim", [0, 3, 7])
def test_files_that_go_wrong_under_a_running_server(tmp_path: Path, harm: str, victim: int) -> None:
    """What is before the harmed block is used, the rest is computed."""
    warm(folder=tmp_path)
    harness = TierHarness(64, tmp_path, num_blocks=16)
    body = request("a", PROMPT, 2)
    harness.add(body)
    table = harness.scheduler._sequences["a"].table
    harness.scheduler.kv.match(table, PROMPT)
    disk = harness.tiers.disk
    assert disk is not None
    path, other = disk.path(table.hashes[victim]), disk.path(table.hashes[(victim + 1) % 8])
    data = path.read_bytes()
    if harm == "delete":
        path.unlink()
    elif harm == "truncate":
        path.write_bytes(data[:100])
    elif harm == "corrupt":
        path.write_bytes(data[:200] + bytes([data[200] ^ 255]) + data[201:])
    else:
        path.write_bytes(other.read_bytes())
    harness.run()
    harness.check(body)
    assert harness.outputs["a"][0].num_cached_tokens == 4 * victim
    assert harness.tiers.counts.fetch_failed == 1


def test_what_an_adapter_made_does_not_outlive_the_process(tmp_path: Path) -> None:
    harness = TierHarness(64, tmp_path, num_blocks=16)
    harness.add(request("a", PROMPT, 2, adapter=("x", 0)))
    harness.run()
    harness.settle()
    stats = harness.scheduler.stats()
    assert stats.host_blocks == 8 and stats.disk_blocks == 0


def test_a_reset_forgets_every_tier(tmp_path: Path) -> None:
    harness = warm(folder=tmp_path)
    assert harness.scheduler.reset_prefix_cache() > 8
    harness.settle()
    body = request("a", PROMPT, 2)
    harness.add(body)
    harness.run()
    assert harness.outputs["a"][0].num_cached_tokens == 0 and not harness.tiers.counts.loaded
    harness.check(body)
    harness.settle()
    assert harness.scheduler.stats().disk_blocks == 8, "computed after the reset: kept"


def test_a_device_that_loses_its_cache_gets_it_back_from_below() -> None:
    harness = TierHarness(64, num_blocks=16, chance=0.0)
    first = request("first", PROMPT, 2)
    harness.add(first)
    harness.run()
    assert harness.copies.backlog and harness.scheduler.lose_device_cache() == 8 and not harness.copies.backlog
    harness.executor.store.clear()
    harness._chance = 1.0
    again = request("again", PROMPT, 2)
    harness.add(again)
    harness.run()
    harness.check(again)
    assert harness.scheduler.stats().lifted_tokens == 32


def test_a_prompt_of_whole_blocks_comes_back_whole() -> None:
    """But for its last token, which is computed to have something to sample from."""
    harness = warm()
    body = request("a", PROMPT[:32], 2)
    harness.add(body)
    harness.run()
    harness.check(body)
    assert harness.scheduler.stats().lifted_tokens == 32 and harness.outputs["a"][0].num_cached_tokens == 31


def test_a_reset_while_blocks_come_up() -> None:
    harness = warm()
    harness._chance = 0.0
    body = request("a", PROMPT, 2)
    harness.add(body)
    harness.step()
    assert harness.scheduler._lifts
    harness.scheduler.reset_prefix_cache()
    harness._chance = 1.0
    harness.run()
    harness.check(body)
    assert harness.outputs["a"][0].num_cached_tokens == 0


def test_aborted_while_blocks_come_up() -> None:
    harness = warm()
    harness._chance = 0.0
    harness.add(request("a", PROMPT, 2))
    harness.scheduler.schedule()
    assert harness.scheduler._lifts and harness.scheduler.abort(["a"]) == ["a"]
    assert not harness.scheduler.has_work() and harness.scheduler.stats().num_waiting == 0
    harness.settle()
    harness.check_idle()
    assert not harness.scheduler._lifts


def test_a_copy_that_its_block_has_overtaken_counts_for_nothing() -> None:
    harness = TierHarness(64, num_blocks=16, chance=0.0)
    harness.add(request("a", PROMPT, 2))
    harness.run()
    flood(harness)
    assert harness.copies.backlog > 0
    harness.settle()
    assert harness.tiers.counts.overtaken > 0
    body = request("b", PROMPT, 2)
    harness.add(body)
    harness._chance = 1.0
    harness.run()
    harness.check(body)


def test_what_a_step_costs_is_measured() -> None:
    """By the steps that say something of it: 64 tokens or more."""
    now = [0.0]
    harness = TierHarness(64, num_blocks=64, max_num_batched_tokens=128, max_model_len=200)
    harness.scheduler.journal.clock = lambda: now[0]
    execute = harness.executor.execute

    def slow(plan: StepPlan) -> StepResult:
        now[0] += 0.01 * plan.num_tokens
        return execute(plan)

    harness.executor.execute = slow  # type: ignore[method-assign]
    harness.add(request("a", list(range(30)), 3))
    harness.run()
    assert harness.scheduler.costs.seconds_per_token is None
    harness.add(request("b", [7] * 128, 3))
    harness.run()
    assert harness.scheduler.costs.seconds_per_token == pytest.approx(0.01)


def test_computing_is_chosen_where_it_is_cheaper() -> None:
    harness = warm()
    harness.scheduler.costs.computed(1000, 1e-6)
    harness.tiers.seconds["load"] = 1.0
    body = request("a", PROMPT, 2)
    harness.add(body)
    harness.run()
    harness.check(body)
    assert harness.scheduler.stats().lifted_tokens == 0


def test_a_preempted_sequence_comes_back_from_host_memory() -> None:
    """Its answer is what it would have been, and its full blocks are not computed twice."""
    harness = TierHarness(64, num_blocks=16, max_num_seqs=2, block_size=4, max_model_len=64)
    bodies = [request("a", [1] * 20, 40), request("b", [2] * 20, 40)]
    harness.add(*bodies)
    computed = 0
    while harness.scheduler.has_work():
        computed += harness.step().num_tokens
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.num_swaps > 0 and stats.lifted_tokens > 0
    for body in bodies:
        harness.check(body)
    assert computed <= 2 * 59 + stats.num_preemptions * 4, "more than a partial block was computed again"
    told = harness.scheduler.journal.explain("b")
    assert told is not None and told["preemptions"][0]["then"] == "bring back"


@pytest.mark.parametrize(
    ("host_slots", "num_blocks", "with_disk", "prefix_caching"),
    [(2, 10, True, True), (9, 10, True, True), (9, 14, True, True), (64, 10, False, True), (9, 10, True, False)],
)
def test_heavy_traffic_with_moves_that_take_their_time(
    tmp_path: Path, host_slots: int, num_blocks: int, with_disk: bool, prefix_caching: bool
) -> None:
    """In the smallest legal pool, with lanes that work now and then and sometimes fail, resets and aborts between: each
    request ends, with its own tokens."""
    rng = random.Random(host_slots * num_blocks)
    harness = TierHarness(
        host_slots, tmp_path if with_disk else None, chance=0.4, seed=7, disk_limit=20 * PAGE, max_model_len=40,
        block_size=4, num_blocks=num_blocks, max_num_seqs=5, max_num_batched_tokens=24, prefix_caching=prefix_caching,
    )  # fmt: skip
    accepted: dict[str, EngineRequest] = {}
    for i in range(120):
        prompt = rng.choice(PREFIXES) + [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        params = {"prompt_logprobs": rng.choice([None, None, None, 0]), "logprobs": rng.choice([None, 0])}
        fields = {"cache_salt": rng.choice([None, None, "s"]), "fork_of": f"r{i - 1}" if rng.random() < 0.2 else None}
        if fields["fork_of"] in accepted and rng.random() < 0.7:
            prompt = accepted[str(fields["fork_of"])].prompt_token_ids
        body = request(f"r{i}", prompt, rng.randint(0, 40 - len(prompt)), params=params, **fields)
        harness.add(body)
        accepted[body.request_id] = body
        for _ in range(rng.randint(0, 6)):
            if harness.scheduler.has_work():
                harness.step()
        live = [name for name in accepted if not harness.finished(name)]
        if live and rng.random() < 0.1:
            gone = rng.choice(live)
            assert harness.scheduler.abort([gone]) == [gone]
            del accepted[gone]
        if rng.random() < 0.02:
            harness.scheduler.reset_prefix_cache()
    harness.run(20_000)
    for body in accepted.values():
        harness.check(body)
    harness.settle()
    harness.check_idle()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0
    if prefix_caching and host_slots > 2:
        assert stats.lifted_tokens > 0
        assert (stats.fetched_tokens > 0) == with_disk
