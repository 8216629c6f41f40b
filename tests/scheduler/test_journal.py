"""What became of requests, from real schedules, with a clock that counts its readings."""

from __future__ import annotations

import itertools
from typing import Any

from enginecore.scheduler import Scheduler
from enginecore.scheduler.journal import Journal

from tests.scheduler.fake_executor import Harness, request


def harness(keep: int = 100, steps: int = 100, **config: Any) -> Harness:
    made = Harness(**config)
    counter = itertools.count()
    made.scheduler = Scheduler(made.config, Journal(keep, steps, clock=lambda: float(next(counter))))
    return made


def explain(made: Harness, name: str) -> dict[str, Any]:
    answer = made.scheduler.journal.explain(name)
    assert answer is not None
    return answer


def test_a_request_that_runs_alone() -> None:
    made = harness(max_num_batched_tokens=4)
    made.add(request("a", list(range(10)), 4))
    assert explain(made, "a")["state"] == "waiting" and explain(made, "a")["prefill"] is None
    made.step()
    assert explain(made, "a")["state"] == "running" and explain(made, "a")["decode"] is None
    made.run()
    told = explain(made, "a")
    assert (told["state"], told["finish_reason"]) == ("ended", "length")
    assert told["queued"]["steps_by_reason"] == {} and told["queued"]["seconds"] > 0
    assert told["prefill"]["computed_tokens"] == 10 and told["prefill"]["reused_tokens"] == 0
    assert told["prefill"]["prefix_match_ended"] == {"block": 0, "reason": "never seen under this salt and adapter"}
    assert told["decode"]["output_tokens"] == 4
    assert told["batch"]["steps"] == 3 + 3 and told["batch"]["complete"]
    assert told["batch"]["tokens"] == {"min": 1, "mean": (10 + 3) / 6, "max": 4}
    assert told["batch"]["sequences"] == {"min": 1, "mean": 1.0, "max": 1}
    assert told["batch"]["last_steps"] == {"sequences": [1] * 6, "tokens": [4, 4, 2, 1, 1, 1]}


def test_time_before_the_queue_is_time_too() -> None:
    """A request whose grammar had to be compiled."""
    now = [100.0]
    made = Harness()
    made.scheduler = Scheduler(made.config, Journal(clock=lambda: now[0]))
    made.add(request("a", [1, 2], 1), request("b", [1, 2], 1))
    made.scheduler.journal.held("a", 97.5)
    now[0] = 101.0
    made.run()
    queued = explain(made, "a")["queued"]
    assert (queued["seconds"], queued["grammar_seconds"]) == (3.5, 2.5)
    assert explain(made, "b")["queued"]["grammar_seconds"] is None


def test_a_request_is_queued_from_when_it_was_handed_over() -> None:
    """It has waited for the step that was underway; a time of another clock is none."""
    now = [1000.0]
    made = Harness()
    made.scheduler = Scheduler(made.config, Journal(clock=lambda: now[0]))
    made.add(*(request(name, [1, 2], 1) for name in "abc"))
    for name, at in (("a", 999.5), ("b", 1e9), ("c", 0.0), ("gone", 999.0)):
        made.scheduler.journal.sent(name, at)
    now[0] = 1001.0
    made.run()
    assert [explain(made, name)["queued"]["seconds"] for name in "abc"] == [1.5, 1.0, 1.0]


def test_why_requests_wait() -> None:
    made = harness(max_num_seqs=3, max_num_batched_tokens=8, num_blocks=8, max_model_len=32)
    made.add(request("a", list(range(7)), 3), request("b", [9] * 20, 10), request("c", [8] * 20, 10))
    made.run()
    assert "token budget" in explain(made, "c")["queued"]["steps_by_reason"]
    assert "KV blocks" in explain(made, "c")["queued"]["steps_by_reason"]
    made.add(*(request(name, [len(name)], 2) for name in ("x", "xx", "xxx", "xxxx")))
    made.run()
    assert explain(made, "xxxx")["queued"]["steps_by_reason"] == {"no free slot": 2}


def test_a_fork_waits_for_its_sibling() -> None:
    made = harness()
    made.add(request("p", list(range(10)), 4), request("q", list(range(10)), 4, fork_of="p"))
    made.run()
    told = explain(made, "q")
    assert told["queued"]["steps_by_reason"] == {"a sibling computes the same prompt": 1}
    assert (told["prefill"]["forked_from"], told["prefill"]["reused_tokens"]) == ("p", 9)


def test_who_preempted_whom() -> None:
    made = harness(num_blocks=8, max_model_len=32, prefix_caching=False)
    made.add(request("a", [1] * 8, 20), request("b", [2] * 8, 20))
    states = []
    while made.scheduler.has_work():
        made.step()
        states.append(explain(made, "b")["state"])
    assert [state for state, _ in itertools.groupby(states)] == ["running", "preempted", "running", "ended"]
    assert explain(made, "a")["preemptions"] == []
    first = explain(made, "b")["preemptions"][0]
    assert first["by"] == "a" and first["tokens"] > 8 and first["at_s"] > 0
    assert first["waited_s"] > 0 and first["reused_tokens"] == 0


def test_a_stop_string_is_no_abort() -> None:
    made = harness()
    made.add(request("a", [1, 2], 9), request("b", [1, 2], 9))
    made.step()
    made.scheduler.abort(["a"], "stop")
    made.scheduler.abort(["b"])
    assert [explain(made, name)["finish_reason"] for name in "ab"] == ["stop", "abort"]


def test_why_a_prefix_match_ends() -> None:
    made = harness(num_blocks=8, max_model_len=32)
    reasons = []
    prompt = list(range(12))

    def ended(name: str, tokens: list[int], **fields: Any) -> None:
        made.add(request(name, tokens, 1, **fields))
        made.run()
        reasons.append(tuple(explain(made, name)["prefill"]["prefix_match_ended"].values())[:2])

    ended("first", prompt)
    ended("again", prompt)
    ended("longer", [*prompt, 5, 5, 5, 5, 5])
    ended("salted", prompt, cache_salt="s")
    ended("unread", prompt, cached_prompt=False)
    ended("large", [7] * 31)
    ended("evicted", prompt)
    made.scheduler.reset_prefix_cache()
    ended("reset", prompt)
    never = "never seen under this salt and adapter"
    assert reasons == [
        (0, never),
        (2, "the last token of the prompt is always computed"),
        (3, never),
        (0, never),
        (0, "the request asked for every prompt token to be computed"),
        (0, never),
        (0, "evicted"),
        (0, "never seen since the cache was reset"),
    ]


def test_the_last_requests_and_steps_are_kept() -> None:
    made = harness(keep=3, steps=4)
    made.add(*(request(f"r{i}", [i], 9) for i in range(5)))
    assert [made.scheduler.journal.explain(f"r{i}") is None for i in range(5)] == [True, True, False, False, False]
    made.run()
    assert explain(made, "r2")["batch"] == {"steps": 0, "complete": False}
    assert not explain(made, "r4")["batch"]["complete"] and explain(made, "r4")["batch"]["steps"] == 4


def test_aborted_and_refused_requests() -> None:
    made = harness()
    made.add(request("a", [1, 2, 3], 9))
    made.step()
    made.scheduler.abort(["a"])
    told = explain(made, "a")
    assert (told["state"], told["finish_reason"], told["decode"]["output_tokens"]) == ("ended", "abort", 1)
    assert made.scheduler.add(request("b", [], 9)) is not None
    assert made.scheduler.journal.explain("b") is None
