"""What a step of the scheduler costs: schedule() and update(), all sequences decoding, no device and no model.

    python bench/bench_scheduler.py [--json] [--steps 64] [--repeats 7] [--ahead] [--profile]

Reports microseconds a running request a step: the mean over `--steps` steps (so that block boundaries are paid for as
often as they come), best of `--repeats` rounds. Processor time, because the noise of a shared machine only ever adds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from dataclasses import asdict, dataclass

from enginecore.request import EngineRequest, SamplingParams
from enginecore.scheduler import Scheduler, SchedulerConfig, StepPlan, StepResult

PROMPT, BLOCK_SIZE, MAX_MODEL_LEN = 128, 16, 2048


@dataclass(frozen=True)
class Figure:
    running: int
    waiting: int
    prefix_caching: bool
    us_a_request: float
    us_a_step: float
    schedule_share: float


def request(number: int, rng: random.Random, length: int) -> EngineRequest:
    prompt = [rng.randrange(50_000) for _ in range(length)]
    return EngineRequest(
        f"request-{number}", prompt, SamplingParams(temperature=0, max_tokens=None), MAX_MODEL_LEN - length
    )


def decoding(running: int, waiting: int, prefix_caching: bool) -> Scheduler:
    """A scheduler whose `running` sequences have all been prefilled, with lengths spread over a block."""
    rng = random.Random(0)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=running,
            max_num_batched_tokens=max(8192, running),
            max_model_len=MAX_MODEL_LEN,
            num_blocks=running * MAX_MODEL_LEN // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            prefix_caching=prefix_caching,
        )
    )
    for i in range(running):
        assert scheduler.add(request(i, rng, PROMPT + i % BLOCK_SIZE)) is None
    while len(scheduler.running) < running or scheduler.schedule().num_tokens > running:
        step(scheduler, rng)
    shared = request(0, rng, 8).prompt_token_ids
    for i in range(waiting):
        params = SamplingParams(temperature=0, max_tokens=None)
        assert scheduler.add(EngineRequest(f"waiting-{i}", shared, params, 64)) is None
    return scheduler


def results(plan: StepPlan, rng: random.Random) -> StepResult:
    return StepResult([rng.randrange(50_000) for _ in range(int(plan.samples_N.sum()))])


def step(scheduler: Scheduler, rng: random.Random) -> None:
    plan = scheduler.schedule()
    scheduler.update(plan, results(plan, rng))


def measure(running: int, waiting: int, prefix_caching: bool, steps: int, repeats: int, ahead: bool = False) -> Figure:
    """`ahead`: each step is planned before the last is booked."""
    scheduler, rng = decoding(running, waiting, prefix_caching), random.Random(1)
    best = (float("inf"), 0.0)
    flight = scheduler.depart(scheduler.schedule()) if ahead else None
    for _ in range(repeats):
        planning = booking = 0.0
        for _ in range(steps):
            begun = time.process_time()
            assert not ahead or scheduler.can_plan_ahead()
            plan = scheduler.schedule()
            before, flight = flight, scheduler.depart(plan)
            planned = time.process_time()
            result = results(plan, rng)
            ran = time.process_time()
            scheduler.book(flight if before is None else before, result)
            flight = flight if ahead else None
            booking += time.process_time() - ran
            planning += planned - begun
        best = min(best, ((planning + booking) / steps, planning / (planning + booking)))
    assert len(scheduler.running) == running and scheduler.stats().num_preemptions == 0
    seconds, share = best
    return Figure(running, waiting, prefix_caching, seconds * 1e6 / running, seconds * 1e6, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ahead", action="store_true", help="plan each step before the last is booked")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--profile", action="store_true", help="profile 1,024 running with prefix caching instead")
    options = parser.parse_args()
    if options.profile:
        scheduler, rng = decoding(1024, 0, True), random.Random(1)
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(options.steps):
            step(scheduler, rng)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        return
    if not options.json:
        print(
            f"{'running':>8} {'waiting':>8} {'prefix cache':>13} {'us/request':>11} {'us/step':>9} {'in schedule':>12}"
        )
    for prefix_caching in (False, True):
        for running in (256, 1024):
            for waiting in (0, 100_000):
                figure = measure(running, waiting, prefix_caching, options.steps, options.repeats, options.ahead)
                if options.json:
                    print(json.dumps(asdict(figure)))
                else:
                    cache = "on" if prefix_caching else "off"
                    costs = f"{figure.us_a_request:>11.2f} {figure.us_a_step:>9.0f} {figure.schedule_share:>12.0%}"
                    print(f"{running:>8} {waiting:>8} {cache:>13} {costs}")


if __name__ == "__main__":
    main()
