"""KV memory saved by sharing: samples of one prompt, and beams.

The real scheduler and block pool; no device, since time has no part in it. What beams do depends on how peaked a
model's predictions are: each beam's log-probabilities are those of some position of a real model's answers
(`data/beam_profile.json`), drawn anew at each step.
"""

from __future__ import annotations

import json
from importlib import resources

import numpy as np

from enginecore.cli.bench_kv_published import BLOCK_SIZE, MAX_MODEL_LEN, NUM_SLOTS
from enginecore.cli.bench_traffic import Traffic, draw_requests
from enginecore.plan import StepPlan, StepResult
from enginecore.request import BeamOptions, EngineRequest, SamplingParams, TokenLogprobs
from enginecore.scheduler import Scheduler, SchedulerConfig

_PROFILE = "beam_profile.json"


class DrawnModel:
    """Answers plans with tokens, and beams with a real model's log-probabilities."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        text = resources.files("enginecore.cli").joinpath("data").joinpath(_PROFILE).read_text(encoding="utf-8")
        self._rows: list[list[float]] = json.loads(text)["rows"]
        self._scheduler = scheduler
        self._rng = np.random.default_rng(seed)

    def execute(self, plan: StepPlan) -> StepResult:
        sampling = np.flatnonzero(plan.samples_N).tolist()
        logprobs = {}
        for row in sampling:
            slot = int(plan.slots_N[row])
            if self._scheduler.running.beam_S[slot]:
                logprobs[row] = self._continuations(slot)
        return StepResult([0] * len(sampling), logprobs)

    def _continuations(self, slot: int) -> TokenLogprobs:
        """Best tokens that no other beam has: what matters is who goes on, not what is said."""
        values = self._rows[int(self._rng.integers(len(self._rows)))]
        first = int(self._rng.integers(1, 2**30))
        return TokenLogprobs([0, *range(first, first + len(values))], [0.0, *values], 1)


def saved(lengths: str, width: int, *, beams: bool, num_requests: int, seed: int = 0) -> float:
    """The share of blocks that sharing saves, over a run with `width` samples or beams for each request: one minus
    blocks in use over blocks that the sequences' tables have in all, summed over steps."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE,
            num_blocks=NUM_SLOTS // BLOCK_SIZE, seed=seed,
        )
    )  # fmt: skip
    traffic = Traffic(num_requests=num_requests, lengths=lengths, seed=seed)
    for request in draw_requests(traffic, vocab_size=1000, max_model_len=MAX_MODEL_LEN):
        for sequence in _sequences(request, width, beams=beams):
            problem = scheduler.add(sequence)
            if problem is not None:
                raise RuntimeError(problem)
    model, used, held = DrawnModel(scheduler, seed), 0, 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        used += scheduler.pool.num_blocks - scheduler.pool.num_free
        held += int(scheduler.running.num_blocks_S[scheduler.running.order].sum())
        scheduler.update(plan, model.execute(plan))
    return 1 - used / held


def _sequences(request: EngineRequest, width: int, *, beams: bool) -> list[EngineRequest]:
    name, prompt, count = request.request_id, request.prompt_token_ids, request.max_tokens
    if beams:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, beam=BeamOptions(width))
        return [EngineRequest(name, prompt, params, count)]
    return [
        EngineRequest(f"{name}_{i}", prompt, request.params, count, fork_of=f"{name}_0" if i else None)
        for i in range(width)
    ]
