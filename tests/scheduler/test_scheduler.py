"""Scheduler behaviours one at a time, on an executor that checks every plan (see fake_executor.py)."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore.request import EngineRequest
from enginecore.scheduler import StepPlan

from tests.scheduler.fake_executor import BAD_TOKEN, Harness, expected, next_token, request


def served(harness: Harness, plan: StepPlan) -> dict[str, int]:
    """Tokens that each request gets in the plan."""
    table = harness.scheduler.running
    names = [table.sequence(slot).request_id for slot in plan.slots_N.tolist()]
    return dict(zip(names, plan.num_new_N.tolist(), strict=True))


def run_and_note(harness: Harness) -> list[dict[str, int]]:
    plans = []
    while harness.scheduler.has_work():
        plan = harness.scheduler.schedule()
        plans.append(served(harness, plan))
        for output in harness.scheduler.update(plan, harness.executor.execute(plan)):
            harness.outputs[output.request_id].append(output)
    return plans


# ---- batching and chunks -----------------------------------------------------------------------------------------


def test_sequences_join_and_leave_at_any_step() -> None:
    harness = Harness(max_num_seqs=2)
    harness.add(request("a", [1, 2, 3], 2), request("b", [4], 5), request("c", [5, 6], 2))
    assert run_and_note(harness) == [
        {"a": 3, "b": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 2}, {"b": 1, "c": 1}, {"b": 1},
    ]  # fmt: skip
    harness.check_idle()


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(request("a", [1, 2, 3], 4))
    harness.step()
    harness.add(request("b", list(range(20)), 2))
    assert run_and_note(harness) == [{"a": 1, "b": 7}, {"a": 1, "b": 7}, {"a": 1, "b": 6}, {"b": 1}]


def test_the_threshold_caps_each_prompt() -> None:
    harness = Harness(long_prefill_token_threshold=4)
    harness.add(request("a", list(range(10)), 1), request("b", list(range(20, 25)), 1))
    assert run_and_note(harness) == [{"a": 4, "b": 4}, {"a": 4, "b": 1}, {"a": 2}]


def test_a_budget_below_the_number_running_serves_the_first() -> None:
    harness = Harness(max_num_batched_tokens=2)
    requests = [request(name, [1], 3) for name in "abcd"]
    harness.add(*requests)
    plans = run_and_note(harness)
    assert plans[0] == {"a": 1, "b": 1} and all(sum(plan.values()) <= 2 for plan in plans)
    for req in requests:
        harness.check(req)


def test_outputs_come_with_each_token() -> None:
    harness = Harness()
    req = request("a", [1, 2], 3, params={"logprobs": 0})
    harness.add(req)
    harness.run()
    assert [len(output.token_ids) for output in harness.outputs["a"]] == [1, 1, 1]
    assert [output.finish_reason for output in harness.outputs["a"]] == [None, None, "length"]
    harness.check(req)


# ---- admission ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("req", "problem"),
    [
        (request("x", [], 4), "empty"),
        (request("x", [1] * 60, 5), "60 prompt tokens and 5 output tokens exceed max_model_len 64"),
        (request("x", [1] * 30, 12), "needs 11 KV blocks; the cache has 10"),
        (request("busy", [1], 1), "already in use"),
    ],
)
def test_what_can_never_run_is_refused(req: EngineRequest, problem: str) -> None:
    harness = Harness(num_blocks=10)
    harness.add(request("busy", [1], 1))
    assert problem in str(harness.scheduler.add(req))
    harness.run()
    harness.check_idle()


@pytest.mark.parametrize(("prompt", "max_tokens"), [(29, 12), (40, 1), (40, 0)])
def test_what_just_fits_runs(prompt: int, max_tokens: int) -> None:
    """The last token is sampled and never computed, so it needs no slot in the cache."""
    harness = Harness(num_blocks=10)
    req = request("a", [1] * prompt, max_tokens)
    harness.add(req)
    harness.run()
    harness.check(req)
    assert harness.scheduler.stats().num_preemptions == 0


def test_an_id_may_be_used_again_once_it_is_done() -> None:
    harness = Harness()
    for prompt in ([1], [2, 3]):
        req = request("a", prompt, 2)
        harness.add(req)
        harness.run()
        harness.check(req)


def test_a_sequence_waits_until_its_whole_prompt_has_room() -> None:
    harness = Harness(num_blocks=10, max_num_batched_tokens=8, watermark=0.0)
    harness.add(request("a", list(range(24)), 1), request("b", list(range(50, 70)), 1))
    first, *rest = run_and_note(harness)
    assert first == {"a": 8}, "b's five blocks are free now, but a's prompt still needs four of them"
    assert rest[:2] == [{"a": 8}, {"a": 8}] and rest[2] == {"b": 8}


@pytest.mark.parametrize(("watermark", "together"), [(0.0, True), (0.2, False)])
def test_the_watermark_leaves_room_to_grow(watermark: float, together: bool) -> None:
    harness = Harness(num_blocks=10, watermark=watermark)
    harness.add(request("a", [1] * 20, 4), request("b", [2] * 20, 1))
    harness.step()
    assert len(harness.scheduler.running) == (1 if not together else 1 + (not harness.finished("b")))
    assert harness.finished("b") == together
    harness.run()


def test_the_watermark_never_stops_a_lone_sequence() -> None:
    harness = Harness(num_blocks=10, watermark=0.5)
    req = request("a", [1] * 38, 2)
    harness.add(req)
    harness.run()
    harness.check(req)


def test_nobody_overtakes_the_first_waiting() -> None:
    harness = Harness(num_blocks=10, watermark=0.0)
    harness.add(request("a", [1] * 30, 2), request("big", [2] * 20, 1), request("small", [3], 1))
    harness.step()
    assert not harness.finished("small") and harness.scheduler.stats().num_waiting == 2
    harness.run()


def test_fcfs_ignores_priority_and_priority_does_not() -> None:
    for policy, order in (("fcfs", "abc"), ("priority", "bca")):
        harness = Harness(max_num_seqs=1, policy=policy)
        harness.add(request("a", [1], 1, priority=1), request("b", [2], 1, priority=-1), request("c", [3], 1))
        plans = run_and_note(harness)
        assert "".join(name for plan in plans for name in plan) == order


# ---- preemption --------------------------------------------------------------------------------------------------


def crowd(**config: Any) -> tuple[Harness, list[EngineRequest]]:
    """Three sequences that fit at first and outgrow the pool."""
    harness = Harness(num_blocks=16, watermark=0.0, **config)
    requests = [request(name, [i] * 14, 34, priority=-i) for i, name in enumerate("abc")]
    harness.add(*requests)
    return harness, requests


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("policy", "winner", "loser"), [("fcfs", "a", "c"), ("priority", "c", "a")])
def test_the_last_in_order_is_preempted_and_recomputed(
    policy: str, winner: str, loser: str, prefix_caching: bool
) -> None:
    harness, requests = crowd(policy=policy, prefix_caching=prefix_caching)
    sequences = harness.scheduler._sequences.copy()
    plans = run_and_note(harness)
    assert sequences[winner].num_preemptions == 0 < sequences[loser].num_preemptions
    assert sum(plan.get(loser, 0) for plan in plans) > 14 + 33, "nothing was recomputed"
    assert harness.scheduler.stats().num_preemptions == sum(one.num_preemptions for one in sequences.values())
    for req in requests:
        harness.check(req)
    harness.check_idle()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    harness, _ = crowd()
    harness.add(request("d", [9], 1))
    before = 0
    while harness.scheduler.has_work():
        plan = harness.step()
        preempted = harness.scheduler.stats().num_preemptions
        assert preempted == before or not plan.new
        before = preempted
    assert before > 0


def test_counters_count_a_preempted_request_once() -> None:
    harness, requests = crowd()
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prompt_tokens == sum(len(req.prompt_token_ids) for req in requests)
    assert stats.generation_tokens == sum(len(harness.tokens(req.request_id)) for req in requests)
    assert stats.prefix_cache_queries == stats.prompt_tokens


def test_prompt_logprobs_survive_chunks_and_preemption() -> None:
    """The second is thrown out while its prompt is half computed: its log-probabilities start again from the first."""
    harness = Harness(num_blocks=16, max_num_batched_tokens=5, watermark=0.0)
    first = request("a", [1] * 10, 50)
    second = request("b", list(range(40)), 3, params={"prompt_logprobs": 0})
    harness.add(first)
    while len(harness.tokens("a")) < 11:
        harness.step()
    harness.add(second)
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    harness.check(first)
    harness.check(second)


def test_prompt_logprobs_come_once_even_when_preempted_after_the_first_token() -> None:
    harness = Harness(num_blocks=16, watermark=0.0)
    requests = [request(name, [i] * 14, 34, params={"prompt_logprobs": 0}) for i, name in enumerate("abc")]
    harness.add(*requests)
    harness.run()
    assert harness.scheduler.stats().num_preemptions > 0
    for req in requests:
        harness.check(req)


# ---- prefix cache ------------------------------------------------------------------------------------------------


def hits(harness: Harness, name: str) -> int:
    return harness.outputs[name][0].num_cached_tokens


def test_a_second_request_computes_only_what_is_new() -> None:
    harness = Harness()
    harness.add(request("a", list(range(20)), 1))
    harness.run()
    harness.add(request("b", list(range(20)), 1), request("c", [*range(10), 99], 1))
    assert run_and_note(harness)[0] == {"b": 1, "c": 1}
    assert (hits(harness, "a"), hits(harness, "b"), hits(harness, "c")) == (0, 19, 10)
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.copied_tokens) == (51, 29, 2)
    harness.check_idle()


def test_a_prompt_of_whole_cached_blocks_shares_them_all_and_copies_none() -> None:
    harness = Harness(num_blocks=5, max_model_len=20)
    prompt = list(range(16))
    first, again, fork = request("a", prompt, 3), request("b", prompt, 3), request("c", prompt, 3, fork_of="b")
    harness.add(first)
    harness.run()
    harness.add(again)
    plan = harness.step()
    assert plan.num_tokens == 1 and not plan.copies and harness.scheduler.stats().num_used_blocks == 4
    assert harness.executor.rows[0].write_from == 16, "the last token is computed, but its block is others' too"
    harness.add(fork)
    assert harness.scheduler.stats().num_free_blocks == 1
    harness.run()
    for each in (first, again, fork):
        harness.check(each)
    harness.check_idle()


@pytest.mark.parametrize("copies_blocks", [True, False])
def test_a_prompt_that_leaves_a_cached_one_inside_a_block_goes_on_from_there(copies_blocks: bool) -> None:
    harness = Harness(copies_blocks=copies_blocks, block_size=8)
    harness.add(request("a", list(range(24)), 1))
    harness.run()
    prompts = {"b": [*range(13), 30, 31, 32], "c": [*range(8), 30, *range(9, 30)], "d": [*range(9), 30, 31]}
    requests = [request(name, prompt, 6) for name, prompt in prompts.items()]
    harness.add(*requests)
    plan = harness.step()
    wanted = {"b": 13 if copies_blocks else 8, "c": 8, "d": 8}  # a single token in common is not worth a copy
    harness.run()
    assert {name: hits(harness, name) for name in prompts} == wanted
    assert len(plan.copies) == copies_blocks
    for each in requests:
        harness.check(each)
    harness.check_idle()


def test_a_block_is_copied_only_when_there_is_room_to_hold_both() -> None:
    harness = Harness(num_blocks=3, max_model_len=12)
    harness.add(request("a", list(range(12)), 0))
    harness.run()
    late = request("b", [*range(6), 30, 31, 32], 1)
    harness.add(late)
    assert not harness.step().copies
    harness.run()
    harness.check(late)
    harness.check_idle()


def test_answers_are_cached_too() -> None:
    harness = Harness()
    req = request("a", [1, 2, 3], 10)
    harness.add(req)
    harness.run()
    turn = request("b", [1, 2, 3, *harness.tokens("a"), 7], 1)
    harness.add(turn)
    harness.run()
    assert hits(harness, "b") == 12
    harness.check(turn)


def test_running_sequences_share_blocks_as_soon_as_they_are_computed() -> None:
    harness = Harness(num_blocks=16)
    harness.add(request("a", list(range(20)), 8))
    harness.step()
    harness.add(request("b", list(range(20)), 8))
    harness.step()
    assert hits(harness, "b") == 19
    assert harness.scheduler.stats().num_used_blocks == 6, "five blocks are held by both"
    harness.run()


@pytest.mark.parametrize(
    ("own", "other", "hit"),
    [
        ({}, {}, 16),
        ({"cache_salt": "s"}, {"cache_salt": "s"}, 16),
        ({"cache_salt": "s"}, {"cache_salt": "t"}, 0),
        ({"cache_salt": "s"}, {}, 0),
        ({}, {"cache_salt": "s"}, 0),
        ({"adapter": ("s", 0)}, {"cache_salt": "s"}, 0),
        ({"adapter": ("s", 0)}, {"adapter": ("s", 1)}, 0),
        ({"adapter": ("s", 0)}, {"adapter": ("s", 0)}, 16),
        ({"cached_prompt": False}, {}, 16),
        ({}, {"cached_prompt": False}, 0),
        ({"params": {"prompt_logprobs": 0}}, {}, 16),
        ({}, {"params": {"prompt_logprobs": 0}}, 0),
    ],
)
def test_who_may_read_whose_blocks(own: dict[str, Any], other: dict[str, Any], hit: int) -> None:
    harness = Harness()
    second = request("b", list(range(18)), 2, **other)
    for req in (request("a", list(range(18)), 2, **own), second):
        harness.add(req)
        harness.run()
    assert hits(harness, "b") == hit
    harness.check(second)


def test_reset_forgets_everything_even_what_is_being_computed() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(request("old", list(range(100, 120)), 1))
    harness.run()
    harness.add(request("a", list(range(20)), 4))
    harness.step()
    assert harness.scheduler.reset_prefix_cache() == 5 + 2
    harness.run()
    for name, prompt in (("b", list(range(20))), ("c", list(range(100, 120)))):
        harness.add(request(name, prompt, 1))
        harness.run()
        assert hits(harness, name) == 0
    harness.add(request("d", list(range(20)), 1))
    harness.run()
    assert hits(harness, "d") == 19


# ---- ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("budget", [64, 3])
def test_max_tokens_0_computes_the_prompt_and_gives_no_token(budget: int, params: dict[str, Any]) -> None:
    harness = Harness(max_num_batched_tokens=budget)
    req = request("a", [1, 2, 3, 4, 5, 6, 7], 0, params={**params, "logprobs": 0})
    harness.add(req)
    harness.run()
    [output] = harness.outputs["a"]
    assert (output.token_ids, output.logprobs, output.finish_reason) == ([], None, "length")
    harness.check(req)
    assert harness.scheduler.stats().generation_tokens == 0


PROMPT = [3, 1, 4, 1, 5]
ANSWER = expected(request("x", PROMPT, 30))[0]


@pytest.mark.parametrize("padding", [0, 20])
def test_stop_token_ids(padding: int) -> None:
    """With more stop tokens than the table has columns, too."""
    unused = list(range(1000, 1000 + padding))
    stop = next(token for i, token in enumerate(ANSWER) if i >= 4 and token not in ANSWER[:i])
    for fields, reason in (
        ({"params": {"stop_token_ids": [*unused, stop]}}, stop),
        ({"params": {"stop_token_ids": unused}, "eos_token_ids": [stop]}, None),
        ({"params": {"stop_token_ids": [*unused, stop], "ignore_eos": True}, "eos_token_ids": [stop]}, stop),
    ):
        harness, req = Harness(), request("a", PROMPT, 30, **fields)
        harness.add(req)
        harness.run()
        last = harness.outputs["a"][-1]
        assert harness.tokens("a") == ANSWER[: ANSWER.index(stop) + 1]
        assert (last.finish_reason, last.stop_reason) == ("stop", reason)
        harness.check(req)


def test_ignore_eos_runs_to_the_limit() -> None:
    harness, req = Harness(), request("a", PROMPT, 30, eos_token_ids=ANSWER, params={"ignore_eos": True})
    harness.add(req)
    harness.run()
    assert harness.tokens("a") == ANSWER and harness.outputs["a"][-1].finish_reason == "length"


def test_stop_tokens_in_the_prompt_do_not_count() -> None:
    harness, req = Harness(), request("a", [7, 7, 7], 2, params={"stop_token_ids": [7]})
    assert next_token([7, 7, 7]) != 7
    harness.add(req)
    harness.run()
    harness.check(req)


def test_an_error_ends_its_own_row_only() -> None:
    harness = Harness()
    bad = request("bad", [1, BAD_TOKEN], 5, params={"logprobs": 0, "prompt_logprobs": 0})
    good = request("good", [1, 2], 5)
    harness.add(bad, good)
    harness.run()
    [output] = harness.outputs["bad"]
    assert (output.finish_reason, output.error, output.token_ids, output.logprobs) == ("error", "bad token", [], None)
    harness.check(good)
    harness.check_idle()
    assert harness.scheduler.stats().generation_tokens == 5


# ---- abort -------------------------------------------------------------------------------------------------------


def test_abort_of_running_waiting_and_preempted() -> None:
    harness, requests = crowd()
    while not harness.scheduler.stats().num_preemptions:
        harness.step()
    late = request("late", [9], 2)
    harness.add(request("gone", [8], 2), late)
    scheduler = harness.scheduler
    assert scheduler._sequences["c"].slot < 0 <= scheduler._sequences["b"].slot
    assert scheduler.abort(["b", "c", "gone", "nobody"]) == ["b", "c", "gone"]
    assert scheduler.abort(["b"]) == []
    assert scheduler.stats().num_running + scheduler.stats().num_waiting == 2
    harness.run()
    harness.check(requests[0])
    harness.check(late)
    harness.check_idle()


def test_abort_frees_at_once() -> None:
    harness = Harness()
    harness.add(*(request(str(i), [i] * 9, 9) for i in range(10)))
    harness.step()
    harness.scheduler.abort(map(str, range(10)))
    harness.check_idle()
    assert not harness.scheduler.has_work()


def test_an_aborted_sequence_leaves_its_finished_blocks_to_others() -> None:
    harness = Harness()
    harness.add(request("a", list(range(9)), 9))
    harness.step()
    harness.scheduler.abort(["a"])
    harness.add(request("b", list(range(9)), 2))
    harness.run()
    assert hits(harness, "b") == 8


# ---- seeds and figures -------------------------------------------------------------------------------------------


def test_seeds_are_the_requests_or_follow_from_the_engines() -> None:
    def seeds(engine_seed: int) -> list[int]:
        harness = Harness(seed=engine_seed)
        harness.add(request("a", [1], 1, seed=5), request("b", [1], 1), request("c", [1], 1))
        return [new.seed for new in harness.step().new]

    assert seeds(0)[0] == 5 and len(set(seeds(0))) == 3
    assert seeds(0) == seeds(0) and seeds(0)[1:] != seeds(1)[1:]


def test_figures() -> None:
    harness = Harness(num_blocks=10, max_num_seqs=1)
    harness.add(request("a", [1] * 9, 2), request("b", [2], 1))
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks, stats.num_steps) == (1, 1, 10, 1)
    assert (stats.num_free_blocks, stats.num_used_blocks) == (7, 3)
    assert (stats.kv_tokens_held, stats.kv_slots_held) == (9, 12)
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 1)
    harness.run()
    assert stats.num_running == 1, "figures are a copy"
    harness.check_idle()
