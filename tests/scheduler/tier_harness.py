"""Lower tiers under the fake executor: moves happen when the test says so, and what they move is checked."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginecore.kvcache.disk import DiskTier
from enginecore.kvcache.host import HostTier
from enginecore.kvcache.lane import Finish, Job, Results
from enginecore.kvcache.tiers import Tiers
from enginecore.plan import StepPlan

from tests.scheduler.fake_executor import FakeExecutor, Harness

PAGE = 512


class ManualLane:
    """Jobs wait until `run`; a job that was begun may end later, as a copy does while steps go on."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._jobs: deque[tuple[Job, Finish]] = deque()

    @property
    def backlog(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job, failed: Finish, *, first: bool = False) -> None:
        (self._jobs.appendleft if first else self._jobs.append)((job, failed))

    def run(self, count: int = 1_000_000, *, fail: bool = False) -> int:
        done = 0
        while self._jobs and done < count:
            job, failed = self._jobs.popleft()
            self._results.put(failed if fail else job())
            done += 1
        return done

    def close(self, timeout: float) -> None:
        self.run()


class ManualResults(Results):
    """Whoever waits gets one more job done."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[ManualLane] = []

    def wait(self, timeout: float) -> bool:
        return bool(self._finished) or any(lane.run(1) for lane in self.lanes)


class StoreMover:
    """Moves the fake executor's slots, as JSON in fixed pages."""

    def __init__(self, executor: FakeExecutor, num_slots: int) -> None:
        self._executor = executor
        self._host = bytearray(num_slots * PAGE)
        self.block_bytes = PAGE

    def fence(self) -> Callable[[], None]:
        return lambda: None

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(self._host)[slot * PAGE : (slot + 1) * PAGE]]

    def to_host(self, pairs: list[tuple[int, int]]) -> None:
        size, store = self._executor.config.block_size, self._executor.store
        for block, slot in pairs:
            entries = [store.get(block * size + offset) for offset in range(size)]
            self.views(slot)[0][:] = json.dumps(entries).encode().ljust(PAGE)

    def to_device(self, pairs: list[tuple[int, int]]) -> None:
        size, store = self._executor.config.block_size, self._executor.store
        for slot, block in pairs:
            for offset, entry in enumerate(json.loads(bytes(self.views(slot)[0]))):
                store.pop(block * size + offset, None)
                if entry is not None:
                    store[block * size + offset] = tuple(entry)


class TierHarness(Harness):
    """`host_slots` of host memory; a disk tier where `folder` is given. `chance` is how likely a lane works after a
    step (1: always, so that the whole is deterministic and prompt)."""

    def __init__(self, host_slots: int, folder: Path | None = None, chance: float = 1.0, seed: int = 0,
                 disk_limit: int = 10**9, **config: Any) -> None:  # fmt: skip
        super().__init__(**config)
        self.results = ManualResults()
        self.copies, self.files, self.writes = (ManualLane(self.results) for _ in range(3))
        self.results.lanes = [self.copies, self.files, self.writes]
        disk = None if folder is None else DiskTier(folder, "model", disk_limit)
        self.tiers = Tiers(
            StoreMover(self.executor, host_slots), self.scheduler.pool, HostTier(host_slots), self.results, self.copies,
            disk, self.files, self.writes,
        )  # fmt: skip
        self.scheduler.tiers = self.tiers
        self._random, self._chance = random.Random(seed), chance

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if plan.empty:
            assert self.scheduler._lifts, "nothing runs, and nothing is coming up"
            self.tiers.wait(1.0)
        else:
            for output in self.scheduler.update(plan, self.executor.execute(plan)):
                assert not self.finished(output.request_id), "news of a request that has ended"
                self.outputs[output.request_id].append(output)
        self.move()
        self.scheduler.pool.check()
        self.tiers.host.check()
        return plan

    def move(self) -> None:
        for lane in self.results.lanes:
            if self._random.random() < self._chance:
                lane.run(self._random.randint(1, 4) if self._chance < 1 else 1_000_000,
                         fail=self._chance < 1 and self._random.random() < 0.1)  # fmt: skip

    def settle(self) -> None:
        """Until nothing is moved any more."""
        while self.tiers.busy:
            for lane in self.results.lanes:
                lane.run()
            self.scheduler.stats()
        self.scheduler.stats()
