"""Speculation: guesses of every quality give the answers that there are without any, in fewer steps where they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from enginecore.ops.dispatch import Ops
from enginecore.plan import StepPlan
from enginecore.request import EngineOutput, EngineStats
from enginecore.runner import ModelRunner
from enginecore.runner.guessing import MOST_EVIDENCE, NgramProposer, Proposal
from enginecore.runner.speculation import Speculation
from enginecore.scheduler import Scheduler, SchedulerConfig

from tests.runner.test_runner import VOCAB, TableModel, answer, request, tokens

MOST = 3


class Certain:
    """Sure of its guesses for each sequence."""

    def propose(self, tokens_SL: np.ndarray, slots_N: np.ndarray, lengths_N: np.ndarray, most: int) -> Proposal:
        ids = [self.guess(tokens_SL[slot, :length], most) for slot, length in zip(slots_N, lengths_N, strict=True)]
        return Proposal(np.array(ids), np.full(len(ids), MOST_EVIDENCE))

    def guess(self, tokens_L: np.ndarray, most: int) -> list[int]:
        raise NotImplementedError


class Oracle(Certain):
    """Guesses that are all right, or all but what comes after the first `good`."""

    def __init__(self, good: int = MOST) -> None:
        self.good = good

    def guess(self, tokens_L: np.ndarray, most: int) -> list[int]:
        right = answer([int(tokens_L[-1])], most)
        return [token if i < self.good else (token + 1) % 40 for i, token in enumerate(right)]


class Noise(Certain):
    """Guesses that have nothing to do with the text."""

    def guess(self, tokens_L: np.ndarray, most: int) -> list[int]:
        return [(int(tokens_L[-1]) * 7 + len(tokens_L) + i) % 40 for i in range(most)]


PROPOSERS = {"right": Oracle(), "half": Oracle(1), "wrong": Oracle(0), "noise": Noise(), "ngram": NgramProposer()}


def run(
    requests: list[Any], proposer: Any | None, **config: Any
) -> tuple[dict[str, list[EngineOutput]], EngineStats, list[StepPlan]]:
    settings = SchedulerConfig(
        **{
            "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_blocks": 60, "block_size": 4,
            "speculates": proposer is not None, **config,
        }
    )  # fmt: skip
    scheduler = Scheduler(settings)
    runner = ModelRunner(
        TableModel(), device=torch.device("cpu"), ops=Ops(None), vocab_size=VOCAB, block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len,
        speculation=None if proposer is None else Speculation(proposer, MOST, 64),
    )  # fmt: skip
    outputs: dict[str, list[EngineOutput]] = {}
    plans = []
    for one in requests:
        assert scheduler.add(one) is None
    while scheduler.has_work():
        plan = scheduler.schedule()
        plans.append(plan)
        assert plan.num_tokens <= settings.max_num_batched_tokens
        for output in scheduler.update(plan, runner.execute(plan)):
            outputs.setdefault(output.request_id, []).append(output)
    stats = scheduler.stats()
    assert stats.num_used_blocks == 0 and stats.num_accepted <= stats.num_drafted
    return outputs, stats, plans


@pytest.mark.parametrize("kind", list(PROPOSERS))
def test_answers_are_those_without_guesses(kind: str) -> None:
    requests = [request(f"r{i}", [i + 1, 2 * i + 3, 5], count) for i, count in enumerate((1, 2, 3, 17))]
    plain, before, _ = run(requests, None)
    guessed, after, plans = run(requests, PROPOSERS[kind])
    for name, outputs in plain.items():
        assert tokens(guessed[name]) == tokens(outputs)
        assert guessed[name][-1].finish_reason == "length"
    assert after.generation_tokens == before.generation_tokens == 23
    assert after.num_drafted > 0 and any(plan.guesses for plan in plans)
    if kind == "right":
        assert after.num_accepted > 0 and after.num_steps < before.num_steps
    if kind == "wrong":
        assert after.num_accepted == 0 and after.num_steps == before.num_steps


def test_sampling_with_a_seed_gives_the_very_tokens_and_logprobs() -> None:
    requests = [request(f"r{i}", [i + 4, 6], 20, temperature=0.7, seed=i, logprobs=2) for i in range(3)]
    requests = [type(one)(**{**{name: getattr(one, name) for name in one.__struct_fields__}, "seed": i})
                for i, one in enumerate(requests)]  # fmt: skip
    plain, _, _ = run(requests, None)
    guessed, stats, _ = run(requests, Oracle())
    assert stats.num_accepted > 0
    for name, outputs in plain.items():
        assert tokens(guessed[name]) == tokens(outputs)
        entries = [entry for output in outputs for entry in output.logprobs or []]
        assert [entry for output in guessed[name] for entry in output.logprobs or []] == entries
        assert len(entries) == 20


def test_nothing_comes_after_a_stop_token() -> None:
    whole = answer([3, 5], 20)
    stop = whole[6]
    one = request("r", [3, 5], 20, stop_token_ids=[stop])
    outputs, stats, _ = run([one], Oracle())
    assert tokens(outputs["r"]) == whole[: whole.index(stop) + 1] and stats.num_accepted > 0
    assert outputs["r"][-1].finish_reason == "stop" and outputs["r"][-1].stop_reason == stop


def test_requests_whose_tokens_are_counted_one_by_one_get_no_guesses() -> None:
    requests = [
        request("counted", [3, 5], 12, repetition_penalty=1.3), request("plain", [3, 5], 12),
        request("biased", [3, 5], 12, logit_bias={7: 4.0}),
    ]  # fmt: skip
    plain, _, _ = run(requests, None)
    guessed, _, plans = run(requests, Oracle())
    assert {name: tokens(outputs) for name, outputs in guessed.items()} == {
        name: tokens(outputs) for name, outputs in plain.items()
    }
    slot = plans[0].new[0].slot
    guessed_slots = {int(plan.slots_N[row]) for plan in plans for row in plan.guesses}
    assert plans[0].new[0].request.request_id == "counted" and slot not in guessed_slots and len(guessed_slots) == 2


def test_a_guess_takes_no_block_that_somebody_needs() -> None:
    requests = [request(f"r{i}", [i + 1, 2, 3, 4, 5], 27) for i in range(4)]
    roomy, _, _ = run(requests, None)
    tight, stats, plans = run(requests, Oracle(), num_blocks=18, watermark=0.0)
    _, before, _ = run(requests, None, num_blocks=18, watermark=0.0)
    assert {name: tokens(outputs) for name, outputs in tight.items()} == {
        name: tokens(outputs) for name, outputs in roomy.items()
    }
    assert before.num_preemptions > 0 and stats.num_preemptions > 0 and any(plan.guesses for plan in plans)


def test_blocks_of_accepted_tokens_are_cached_and_hold_what_was_computed() -> None:
    first, _, _ = run([request("a", [3, 5, 7, 9], 24)], Oracle())
    text = [3, 5, 7, 9, *tokens(first["a"])]
    settings = {"num_blocks": 30}
    scheduler_outputs, stats, _ = run(
        [request("a", [3, 5, 7, 9], 24), request("b", text[:21], 3)], Oracle(), max_num_seqs=1, **settings
    )
    assert stats.prefix_cache_hits == 20 and tokens(scheduler_outputs["b"]) == answer(text[:21], 3)
