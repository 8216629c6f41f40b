"""Sequences of one prompt: it is computed once, its blocks are shared, and nothing stays behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
from enginecore.request import EngineRequest

from tests.scheduler.fake_executor import Harness, request

PROMPT = list(range(10))


def family(count: int, prompt: list[int] = PROMPT, max_tokens: int = 6, name: str = "f", **body: Any) -> list[
    EngineRequest
]:  # fmt: skip
    return [
        request(f"{name}_{i}", prompt, max_tokens, fork_of=f"{name}_0" if i else None, **body) for i in range(count)
    ]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 10, 12])
def test_the_prompt_is_computed_once(length: int, prefix_caching: bool) -> None:
    harness = Harness(prefix_caching=prefix_caching)
    requests = family(4, PROMPT[:length] + PROMPT[: max(0, length - 10)])
    harness.add(*requests)
    first, second = harness.step(), harness.step()
    assert first.num_tokens == length and len(first.slots_N) == 1
    assert second.num_tokens == 4, "each other sequence computes the last prompt token alone"
    used = harness.scheduler.stats().num_used_blocks
    shared = (length - 1) // 4
    alone = 1 if length % 4 == 0 else 4
    assert used == shared + (length % 4 == 0) + alone, "all whole blocks of the prompt are shared"
    harness.run()
    for each in requests:
        harness.check(each)
    harness.check_idle()
    stats = harness.scheduler.stats()
    from_cache = length == 1 or (prefix_caching and length % 4 in (0, 1))
    assert stats.forked_tokens == (0 if from_cache else 3 * (length - 1))


@pytest.mark.parametrize("num_seqs", [8, 4])
@pytest.mark.parametrize("count", [4, 8])
def test_how_much_memory_a_family_saves(count: int, num_seqs: int) -> None:
    """A prompt of 161 tokens in blocks of 16: eleven blocks a sequence without sharing."""
    prompt = [i % 7 for i in range(161 - 4)]
    harness = Harness(
        max_model_len=256, block_size=16, num_blocks=256, max_num_batched_tokens=256, max_num_seqs=num_seqs
    )
    harness.add(*family(count, prompt))
    harness.step()
    harness.step()
    assert harness.scheduler.stats().num_used_blocks == 9 + min(count, num_seqs)
    harness.run()
    harness.check_idle()


def test_without_copies_whole_blocks_are_shared() -> None:
    harness = Harness(prefix_caching=False, copies_blocks=False)
    requests = family(3)
    harness.add(*requests)
    harness.step()
    assert harness.step().num_tokens == 1 + 2 + 2
    harness.run()
    for each in requests:
        harness.check(each)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("gone", ["f_0", "f_1", "f_2"])
def test_single_members_may_be_aborted(gone: str, steps: int) -> None:
    harness = Harness(max_num_batched_tokens=6)
    requests = family(3)
    harness.add(*requests)
    for _ in range(steps):
        harness.step()
    assert harness.scheduler.stats().num_waiting + harness.scheduler.stats().num_running == 3
    assert harness.scheduler.abort([gone]) == [gone]
    harness.run()
    for each in requests:
        if each.request_id != gone:
            harness.check(each)
    harness.check_idle()


def test_the_one_that_waits_longest_forks_from_whoever_runs() -> None:
    harness = Harness(max_num_seqs=2, prefix_caching=False)
    requests = family(5)
    harness.add(*requests)
    harness.run()
    for each in requests:
        harness.check(each)
    assert harness.scheduler.stats().num_forks >= 2


def test_a_family_keeps_its_place_before_later_requests() -> None:
    harness = Harness(max_num_seqs=3)
    later = request("later", [9, 9, 9], 6)
    harness.add(*family(3), later)
    harness.step()
    harness.step()
    order = harness.scheduler.running.order.tolist()
    names = [harness.scheduler.running.sequence(slot).request_id for slot in order]
    assert names == ["f_0", "f_1", "later"], "there was a free slot while the prompt was computed"
    harness.run()
    harness.check(later)


def test_a_fork_needs_the_same_prompt_and_keys() -> None:
    harness = Harness()
    parent = request("p", PROMPT, 4, cache_salt="a")
    others = [
        request("salt", PROMPT, 4, cache_salt="b", fork_of="p"),
        request("prompt", PROMPT[1:], 4, cache_salt="a", fork_of="p"),
        request("logprobs", PROMPT, 4, cache_salt="a", fork_of="p", params={"prompt_logprobs": 0}),
    ]
    harness.add(parent, *others)
    harness.run()
    for each in (parent, *others):
        harness.check(each)
    assert harness.scheduler.stats().num_forks == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ten_thousand_random_operations_leave_nothing_behind(prefix_caching: bool) -> None:
    rng = random.Random(7)
    harness = Harness(
        max_model_len=40, num_blocks=14, max_num_seqs=6, max_num_batched_tokens=24, prefix_caching=prefix_caching
    )
    waiting_or_running: dict[str, EngineRequest] = {}
    for number in range(10_000):
        choice = rng.random()
        if choice < 0.12 and len(waiting_or_running) < 12:
            prompt = [rng.randrange(2) for _ in range(rng.choice([3, 8, 13, 20]))]
            requests = family(rng.randint(1, 5), prompt, rng.randint(0, 20), name=f"n{number}")
            harness.add(*requests)
            waiting_or_running |= {each.request_id: each for each in requests}
        elif choice < 0.2 and waiting_or_running:
            gone = rng.choice(list(waiting_or_running))
            assert harness.scheduler.abort([gone]) == [gone]
            del waiting_or_running[gone]
        elif choice < 0.21:
            harness.scheduler.reset_prefix_cache()
        elif harness.scheduler.has_work():
            harness.step()
            for name in [name for name in waiting_or_running if harness.finished(name)]:
                harness.check(waiting_or_running.pop(name))
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_forks > 250 and stats.num_preemptions > 100
    assert (stats.copied_tokens > 100) == prefix_caching
    harness.check_idle()
