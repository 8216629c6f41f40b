"""The engine against an independent oracle: 24 greedy answers in float32, token by token, with log-probabilities.

Whatever the engine does to be fast or to fit (batching, chunking, prefix hits, preemption), the answers stay these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.request import EngineRequest, EngineStats, SamplingParams, TokenLogprobs

pytestmark = pytest.mark.model

#: Where an answer leaves the reference's, its best two tokens must have been this close there.
NEAR_TIE = 1e-3
LOGPROB_TOLERANCE = 1e-3
EOS = 2

Answer = tuple[list[int], list[TokenLogprobs]]


class Solver:
    """Runs reference cases on one engine."""

    def __init__(self, **settings: Any) -> None:
        defaults = {"model": "smollm2-135m", "device": "cpu", "dtype": "float32"}
        defaults |= {"max_model_len": 640, "num_blocks": 1024}
        self._client = InprocClient(EngineArgs(**{**defaults, **settings}))
        self._count = 0

    def run(self, cases: list[dict[str, Any]]) -> tuple[list[Answer], EngineStats]:
        names = []
        for case in cases:
            self._count += 1
            names.append(f"r{self._count}")
            params = SamplingParams(temperature=0, max_tokens=64, logprobs=5)
            self._client.add(EngineRequest(names[-1], case["prompt_token_ids"], params, 64, eos_token_ids=[EOS]))
        answers: dict[str, Answer] = {name: ([], []) for name in names}
        stats = EngineStats()
        while self._client.has_work():
            step = self._client.step()
            stats = step.stats
            for output in step.outputs:
                assert output.error is None
                answers[output.request_id][0].extend(output.token_ids)
                answers[output.request_id][1].extend(output.logprobs or [])
        return [answers[name] for name in names], stats

    def close(self) -> None:
        self._client.shutdown()


@pytest.fixture
def solver(request: pytest.FixtureRequest) -> Iterator[Solver]:
    solver = Solver(**getattr(request, "param", {}))
    yield solver
    solver.close()


def check(cases: list[dict[str, Any]], answers: list[Answer]) -> None:
    for case, (tokens, logprobs) in zip(cases, answers, strict=True):
        wanted = case["output_token_ids"]
        same = next((i for i, pair in enumerate(zip(tokens, wanted, strict=False)) if pair[0] != pair[1]), len(wanted))
        if tokens != wanted:
            assert case["smallest_top2_gap"] < NEAR_TIE, f"{case['prompt_token_ids'][:8]}...: differs at {same}"
        for i, (entry, best) in enumerate(zip(logprobs, case["top5"], strict=False)):
            if i > same:
                break
            ours = dict(zip(entry.token_ids, entry.logprobs, strict=True))
            for token, value in best:
                assert abs(ours[token] - value) < LOGPROB_TOLERANCE


def test_alone_then_again_from_the_prefix_cache(solver: Solver, greedy_reference: list[dict[str, Any]]) -> None:
    for case in greedy_reference:
        answers, cold = solver.run([case])
        check([case], answers)
    answers, warm = solver.run(greedy_reference)
    check(greedy_reference, answers)
    assert warm.prefix_cache_hits > cold.prefix_cache_hits + 1000
    assert warm.num_used_blocks == 0


@pytest.mark.parametrize(
    "solver",
    [
        {"enable_prefix_caching": caching, "long_prefill_token_threshold": chunk}
        for caching in (True, False)
        for chunk in (16, 64, 0)
    ],
    indirect=True,
    ids=lambda s: f"caching={s['enable_prefix_caching']} chunk={s['long_prefill_token_threshold'] or 'none'}",
)
def test_all_at_once(solver: Solver, greedy_reference: list[dict[str, Any]]) -> None:
    answers, stats = solver.run(greedy_reference)
    check(greedy_reference, answers)
    assert stats.num_used_blocks == 0
    assert stats.num_preemptions == 0


@pytest.mark.parametrize(
    "solver",
    [
        {"enable_prefix_caching": caching, "num_blocks": 48, "max_num_batched_tokens": budget}
        for caching, budget in ((True, 64), (False, 512))
    ],
    indirect=True,
    ids=lambda s: f"caching={s['enable_prefix_caching']} budget={s['max_num_batched_tokens']}",
)
def test_in_a_pool_so_small_that_requests_are_preempted(
    solver: Solver, greedy_reference: list[dict[str, Any]]
) -> None:
    answers, stats = solver.run(greedy_reference)
    check(greedy_reference, answers)
    assert stats.num_preemptions > 0
    assert stats.num_used_blocks == 0


def test_with_plain_modules_instead_of_fused_ones(greedy_reference: list[dict[str, Any]]) -> None:
    solver = Solver(fuse=False)
    some = greedy_reference[::6]
    check(some, solver.run(some)[0])
    solver.close()
