"""Beam searches: the right answers, one batch a step, shared blocks, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from enginecore.request import BeamAnswer, BeamOptions, EngineRequest

from tests.scheduler.fake_executor import VOCAB, Harness, continuations, request

PROMPT = list(range(10))
EOS = 7


def search(name: str, width: int, max_tokens: int = 8, prompt: list[int] = PROMPT, **body: Any) -> EngineRequest:
    options = {key: body.pop(key) for key in ("length_penalty", "early_stopping") if key in body}
    params = {"beam": BeamOptions(width, **options), **body.pop("params", {})}
    body.setdefault("eos_token_ids", [EOS])
    return request(name, prompt, max_tokens, params=params, **body)


def reference(req: EngineRequest) -> list[tuple[list[int], float]]:
    """(tokens, score) of the answers, from the rules as they stand in transformers' `_beam_search`, over the whole
    vocabulary of every beam."""
    options = req.params.beam
    assert options is not None
    width, penalty, stopping = options.width, options.length_penalty, options.early_stopping
    stops = set(req.params.stop_token_ids or ()) | set(() if req.params.ignore_eos else req.eos_token_ids)
    keep = max(2, 1 + len(stops)) * width
    beams: list[tuple[list[int], np.float32]] = [([], np.float32(0))]
    done: list[tuple[list[int], np.float32]] = []
    for length in range(1, req.max_tokens + 1):
        every = [
            ([*tokens, token], np.float32(total + np.float32(value)))
            for tokens, total in beams
            for token, value in enumerate(continuations(req.prompt_token_ids + tokens))
        ]
        best = sorted(every, key=lambda pair: -pair[1])[:keep]
        hits = [tokens[-1] in stops or length == req.max_tokens for tokens, _ in best]
        for (tokens, total), hit in zip(best[:width], hits[:width], strict=True):
            if hit:
                done.append((tokens, np.float32(total / np.float32(float(length) ** penalty))))
        done = sorted(done, key=lambda pair: -pair[1])[:width]
        beams = [pair for pair, hit in zip(best, hits, strict=True) if not hit][:width]
        if not beams:
            break
        if len(done) == width:
            reach = req.max_tokens if stopping == "never" and penalty > 0 else length
            if stopping is True or beams[0][1] / np.float32(float(reach) ** penalty) <= done[-1][1]:
                break
    return [(tokens, float(score)) for tokens, score in done]


def answers(harness: Harness, name: str) -> list[BeamAnswer]:
    (output,) = harness.outputs[name]
    assert output.beams is not None and output.error is None
    return output.beams


def check(harness: Harness, req: EngineRequest) -> None:
    found = answers(harness, req.request_id)
    wanted = reference(req)
    assert [(answer.token_ids, answer.score) for answer in found] == wanted
    assert len({tuple(answer.token_ids) for answer in found}) == len(found), "answers are distinct"
    stops = set(req.params.stop_token_ids or ()) | set(() if req.params.ignore_eos else req.eos_token_ids)
    for answer in found:
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] in stops else "length")


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_answers_are_those_of_the_rules(width: int, penalty: float, early_stopping: bool | str) -> None:
    harness = Harness(max_num_seqs=12)
    requests = [
        search("eos", width, 12, length_penalty=penalty, early_stopping=early_stopping, eos_token_ids=[EOS, 3]),
        search("on", width, 5, PROMPT[3:], length_penalty=penalty, early_stopping=early_stopping, eos_token_ids=[]),
    ]
    harness.add(*requests)
    harness.run()
    for each in requests:
        check(harness, each)
    harness.check_idle()


def test_each_step_is_one_batch_and_computes_each_token_once() -> None:
    harness = Harness()
    harness.add(search("b", 4, 6, params={"ignore_eos": True}))
    steps = [harness.step() for _ in range(6)]
    assert [plan.num_tokens for plan in steps] == [len(PROMPT), 4, 4, 4, 4, 4]
    assert not harness.scheduler.has_work()
    harness.check_idle()


def test_beams_share_blocks_and_copy_only_the_one_they_write_to() -> None:
    harness = Harness(block_size=16, num_blocks=32, max_model_len=128)
    prompt = [i % 5 for i in range(40)]
    harness.add(search("b", 4, 20, prompt, params={"ignore_eos": True}))
    harness.step()
    assert harness.scheduler.stats().num_used_blocks == 3
    plan = harness.step()
    tables = [blocks for _, _, blocks in plan.block_updates]
    assert len(plan.copies) == 3, "of four beams that write to the prompt's last block one keeps it"
    assert {tuple(blocks[:2]) for blocks in tables} == {(0, 1)} and len({blocks[2] for blocks in tables}) == 4
    held = []
    while harness.scheduler.has_work():
        harness.step()
        held.append(harness.scheduler.stats().num_used_blocks)
    assert max(held) <= 2 + 4 * 2
    assert harness.scheduler.stats().num_forks == 3
    check(harness, search("b", 4, 20, prompt, params={"ignore_eos": True}))
    harness.check_idle()


def test_stop_tokens_end_answers_too_and_say_so() -> None:
    harness = Harness()
    req = search("b", 3, 12, params={"stop_token_ids": [11, 12, 13, 14, 15, 16]}, early_stopping=True)
    harness.add(req)
    harness.run()
    check(harness, req)
    reasons = {(answer.token_ids[-1], answer.stop_reason) for answer in answers(harness, "b")}
    assert reasons <= {(token, token) for token in range(11, 17)} | {(EOS, None)}


def test_the_answers_bring_their_log_probabilities_when_asked() -> None:
    harness = Harness()
    harness.add(search("b", 2, 5, params={"logprobs": 2}))
    harness.run()
    for answer in answers(harness, "b"):
        assert answer.logprobs is not None
        assert [entry.token_ids[0] for entry in answer.logprobs] == answer.token_ids
        total = sum(entry.logprobs[0] for entry in answer.logprobs)
        assert total == pytest.approx(answer.cumulative_logprob, abs=1e-5)
        for i, entry in enumerate(answer.logprobs):
            values = continuations(PROMPT + answer.token_ids[:i])
            assert len(entry.token_ids) == 3 and entry.logprobs[1] == max(values)
            assert entry.rank == 1 + sum(value > values[answer.token_ids[i]] for value in values)


def test_a_beam_of_a_bad_prompt_fails_alone() -> None:
    harness = Harness()
    harness.add(search("bad", 2, prompt=[1, VOCAB, 2]), search("good", 2))
    harness.run()
    assert harness.outputs["bad"][0].error == "bad token"
    check(harness, search("good", 2))
    harness.check_idle()


@pytest.mark.parametrize(
    ("config", "width", "told"),
    [
        ({"max_num_seqs": 2}, 3, "beam_width 3 is more than max_num_seqs 2"),
        ({"max_num_batched_tokens": 2}, 3, "beam_width 3 is more than max_num_batched_tokens 2"),
        ({"num_blocks": 10}, 4, "the request needs 14 KV blocks; the cache has 10"),
        ({"copies_blocks": False}, 2, "copies KV blocks"),
    ],
)
def test_what_can_never_run_is_refused(config: dict[str, Any], width: int, told: str) -> None:
    harness = Harness(**config)
    problem = harness.scheduler.add(search("b", width))
    assert problem is not None and told in problem
    assert not harness.scheduler.has_work()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("when", range(7))
def test_aborted_at_any_time_it_leaves_nothing(when: int, prefix_caching: bool) -> None:
    harness = Harness(max_num_batched_tokens=6, prefix_caching=prefix_caching)
    harness.add(search("b", 3, 9), request("other", [5, 6, 7], 12))
    for _ in range(when):
        harness.step()
    assert harness.scheduler.abort(["b"]) == ["b"]
    harness.run()
    harness.check(request("other", [5, 6, 7], 12))
    harness.check_idle()


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("blocks", [14, 15, 18])
def test_preempted_searches_end_with_the_same_answers(blocks: int, prefix_caching: bool) -> None:
    """The first two searches need 14 blocks each at their longest, which is all that the smallest pool has."""
    harness = Harness(num_blocks=blocks, max_num_seqs=16, prefix_caching=prefix_caching, max_num_batched_tokens=24)
    ignore = {"ignore_eos": True}
    requests = [search(f"b{i}", 4, 8, [i, *PROMPT[1:]], params=ignore) for i in range(3)]
    plain = [request(f"p{i}", [i, 2, 3], 9) for i in range(4)]
    harness.add(*requests, *plain)
    harness.run()
    for each in requests:
        check(harness, each)
    for other in plain:
        harness.check(other)
    if blocks == 14:
        assert harness.scheduler.stats().num_preemptions > 0
    harness.check_idle()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ten_thousand_random_operations_leave_nothing_behind(prefix_caching: bool) -> None:
    rng = random.Random(11)
    harness = Harness(
        max_model_len=40, num_blocks=22, max_num_seqs=7, max_num_batched_tokens=24, prefix_caching=prefix_caching,
        long_prefill_token_threshold=9,
    )  # fmt: skip
    alive: dict[str, EngineRequest] = {}
    for number in range(10_000):
        choice = rng.random()
        prompt = [rng.randrange(2) for _ in range(rng.choice([3, 8, 13, 16]))]
        if choice < 0.1 and len(alive) < 8:
            options = {"length_penalty": rng.choice([0.5, 1.0]), "early_stopping": rng.choice([True, False, "never"])}
            req = search(f"b{number}", rng.randint(1, 4), rng.randint(1, 12), prompt, **options)
            if harness.scheduler.add(req) is None:
                harness.outputs[req.request_id] = []
                alive[req.request_id] = req
        elif choice < 0.2 and len(alive) < 12:
            parent = f"f{number}"
            for i in range(rng.randint(1, 3)):
                req = request(f"{parent}_{i}", prompt, rng.randint(0, 15), fork_of=f"{parent}_0" if i else None)
                harness.add(req)
                alive[req.request_id] = req
        elif choice < 0.25 and alive:
            gone = rng.choice(list(alive))
            assert harness.scheduler.abort([gone]) == [gone]
            del alive[gone]
        elif choice < 0.26:
            harness.scheduler.reset_prefix_cache()
        elif harness.scheduler.has_work():
            harness.step()
            for name in [name for name in alive if harness.finished(name)]:
                req = alive.pop(name)
                if req.params.beam is None:
                    harness.check(req)
                elif number % 4 == 0:
                    check(harness, req)
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.num_forks > 500 and stats.num_preemptions > 100
    harness.check_idle()
