"""The runner between a real scheduler and a model whose logits are a table lookup of the last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enginecore.device import RuntimeBatch
from enginecore.ops.dispatch import Ops
from enginecore.request import EngineOutput, EngineRequest, SamplingParams
from enginecore.runner import ModelRunner
from enginecore.scheduler import Scheduler, SchedulerConfig

VOCAB = 50
TABLE_VV = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
NAN_TOKEN = 49
TABLE_VV[NAN_TOKEN] = float("nan")
TABLE_VV[:, NAN_TOKEN] = -9.0
TABLE_VV[NAN_TOKEN, NAN_TOKEN] = float("nan")
LOGPROBS_VV = torch.log_softmax(TABLE_VV, dim=-1)


class TableModel:
    """float32 logits, or with `choose` the tokens themselves. Keeps the batches it saw."""

    def __init__(self, choose: bool = False) -> None:
        self.choose = choose
        self.batches: list[RuntimeBatch] = []
        self.copies: list[tuple[int, int]] = []

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        self.copies += pairs

    def execute(self, batch: RuntimeBatch) -> torch.Tensor:
        self.batches.append(batch)
        logits_RV = TABLE_VV[torch.from_numpy(batch.token_ids[batch.logits_indices])].clone()
        return logits_RV.argmax(dim=-1) if self.choose else logits_RV

    replayed = False

    def step_seconds(self) -> float | None:
        return None


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(TABLE_VV[tokens[-1]].argmax()))
    return tokens[len(prompt) :]


def request(name: str, prompt: list[int], count: int, **params: Any) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(**{"temperature": 0, **params}), count)


def run(requests: list[EngineRequest], *, choose: bool = False, **config: Any) -> dict[str, list[EngineOutput]]:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 48, "num_blocks": 40, "block_size": 4,
    }  # fmt: skip
    settings = SchedulerConfig(**{**defaults, **config})
    scheduler = Scheduler(settings)
    runner = ModelRunner(
        TableModel(choose), device=torch.device("cpu"), ops=Ops(None), vocab_size=VOCAB, block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs, max_model_len=settings.max_model_len,
    )  # fmt: skip
    outputs: dict[str, list[EngineOutput]] = {}
    for one in requests:
        assert scheduler.add(one) is None
    while scheduler.has_work():
        plan = scheduler.schedule()
        for output in scheduler.update(plan, runner.execute(plan)):
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("budget", [1, 3, 16])
@pytest.mark.parametrize("choose", [True, False])
def test_each_sequence_gets_its_own_tokens(choose: bool, budget: int) -> None:
    requests = [request(str(i), list(range(i, i + 3 * i + 1)), 6) for i in range(6)]
    outputs = run(requests, choose=choose, max_num_batched_tokens=budget, num_blocks=12)
    for one in requests:
        assert tokens(outputs[one.request_id]) == answer(one.prompt_token_ids, 6)


@pytest.mark.parametrize(("budget", "num_blocks"), [(16, 40), (5, 40), (5, 12)])
def test_logprobs_belong_to_their_row_and_position(budget: int, num_blocks: int) -> None:
    """In a batch in which some want them and some do not, in chunks, and (with 12 blocks) through preemption."""
    requests = [
        request("both", list(range(10, 33)), 14, logprobs=2, prompt_logprobs=3),
        request("none", list(range(20, 27)), 20),
        request("output", [5, 6, 7], 20, logprobs=0),
        request("prompt", list(range(1, 21)), 12, prompt_logprobs=0),
    ]
    outputs = run(requests, max_num_batched_tokens=budget, num_blocks=num_blocks)
    for one in requests:
        got, prompt = outputs[one.request_id], one.prompt_token_ids
        assert tokens(got) == answer(prompt, one.max_tokens)
        whole = [*prompt, *tokens(got)]
        for i, output in enumerate(got):
            assert (output.logprobs is None) == (one.params.logprobs is None)
            for entry in output.logprobs or []:
                want = LOGPROBS_VV[whole[len(prompt) + i - 1]]
                assert entry.token_ids == [output.token_ids[0], *want.topk(one.params.logprobs or 0).indices.tolist()]
                assert entry.logprobs[0] == pytest.approx(float(want[output.token_ids[0]]), abs=1e-5)
                assert entry.rank == 1
        assert (got[0].prompt_logprobs is None) == (one.params.prompt_logprobs is None)
        assert all(output.prompt_logprobs is None for output in got[1:])
        for position, found in enumerate(got[0].prompt_logprobs or []):
            if position == 0:
                assert found is None
                continue
            want = LOGPROBS_VV[prompt[position - 1]]
            best = want.topk(one.params.prompt_logprobs or 0).indices.tolist()
            assert found is not None and found.token_ids == [prompt[position], *best]
            assert found.logprobs[0] == pytest.approx(float(want[prompt[position]]), abs=1e-5)
        if got[0].prompt_logprobs is not None:
            assert len(got[0].prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_row_of_nan_ends_with_an_error_and_the_rest_goes_on(temperature: float) -> None:
    bad, good = request("bad", [1, NAN_TOKEN], 5, temperature=temperature), request("good", [1, 2], 5)
    outputs = run([bad, good])
    assert [output.finish_reason for output in outputs["bad"]] == ["error"]
    assert "not finite" in str(outputs["bad"][0].error) and tokens(outputs["bad"]) == []
    assert tokens(outputs["good"]) == answer([1, 2], 5)


def test_seeded_sampling_survives_preemption_and_company() -> None:
    requests = [
        EngineRequest(str(i), [i] * 5, SamplingParams(temperature=1.5, frequency_penalty=0.5), 20, seed=i)
        for i in range(6)
    ]
    roomy = run(requests, num_blocks=100)
    tight = run(requests, num_blocks=12)
    for one in requests:
        alone = run([one])
        name = one.request_id
        assert tokens(roomy[name]) == tokens(tight[name]) == tokens(alone[name])
    assert len({tuple(tokens(roomy[one.request_id])) for one in requests}) == 6


def test_a_model_that_gives_tokens_only_cannot_give_log_probabilities() -> None:
    wanting = [request("a", [1, 2, 3], 3, prompt_logprobs=1), request("b", [4], 3, logprobs=1)]
    outputs = run([*wanting, request("c", [5, 6], 3)], choose=True)
    assert [outputs[name][-1].finish_reason for name in "abc"] == ["error", "error", "length"]
    assert "no log-probabilities" in str(outputs["a"][0].error)
    assert tokens(outputs["c"]) == answer([5, 6], 3)


def test_a_step_without_samples_is_fine() -> None:
    outputs = run([request("a", list(range(20)), 2)], max_num_batched_tokens=3)
    assert tokens(outputs["a"]) == answer(list(range(20)), 2)


def test_choices_of_one_prompt_keep_their_own_seeds_and_log_probabilities() -> None:
    prompt = list(range(10, 20))
    alone, together = [], []
    for i in range(4):
        params = SamplingParams(temperature=1.5, presence_penalty=0.5, logprobs=1)
        alone.append(EngineRequest(f"f{i}", prompt, params, 12, seed=i))
        together.append(EngineRequest(f"f{i}", prompt, params, 12, seed=i, fork_of="f0" if i else None))
    outputs = run(together)
    for one in alone:
        want = run([one])[one.request_id]
        assert [(o.token_ids, o.logprobs) for o in outputs[one.request_id]] == [(o.token_ids, o.logprobs) for o in want]


def test_blocks_are_copied_before_the_step_that_needs_them() -> None:
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=48, num_blocks=40, block_size=4)
    )
    model = TableModel()
    runner = ModelRunner(
        model, device=torch.device("cpu"), ops=Ops(None), vocab_size=VOCAB, block_size=4, max_num_seqs=4,
        max_model_len=48,
    )  # fmt: skip
    for i in range(3):
        scheduler.add(EngineRequest(f"f{i}", [1] * 6, SamplingParams(), 4, fork_of="f0" if i else None))
    for steps in (0, 2):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
        assert len(model.copies) == steps
    tables = [scheduler.running.sequence(slot).table.blocks for slot in scheduler.running.order]
    assert model.copies == [(tables[0][1], tables[1][1]), (tables[0][1], tables[2][1])]
    assert tables[0][0] == tables[1][0] == tables[2][0]
