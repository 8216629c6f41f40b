"""Ranks: processes that join a group and run the checks of level 4 together, `python -m enginecore.testing.ranks`.

    case  --a check, to each rank-->  ranks: run it, talk to each other
          <--one answer from each--

A rank that dies, or does not answer in time, is told by its name, and the others are ended: nothing waits for ever. The
same ranks serve all checks of a job; after a death, or a group that is lost, the next check gets new ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from enginecore.testing.case import DeclaredUnsupported, FalseClaim, Outcome, ProcessDied, ProcessHung

#: Importing torch and making a backend, on a busy machine.
START_SECONDS = 120.0
#: Of the group: joining, and any call that a peer does not join. A check may take a little longer.
GROUP_SECONDS = 10.0
CHECK_SECONDS = 15.0
#: What the others may take once one has failed: they wait for it, mostly in vain.
GRACE_SECONDS = 3.0


#: What a case raises for an answer that is not a pass.
_RAISED: dict[str, type[Exception]] = {
    Outcome.FAIL.value: AssertionError,
    Outcome.DECLARED_UNSUPPORTED.value: DeclaredUnsupported,
    Outcome.FALSE_CLAIM.value: FalseClaim,
    Outcome.CRASH.value: ProcessDied,
    Outcome.HANG.value: ProcessHung,
}


@dataclass
class Rank:
    """One process and what it has answered."""

    index: int
    process: subprocess.Popen[bytes]
    partial: bytes = b""
    answer: dict[str, Any] | None = None
    ended: str | None = None

    @property
    def silent(self) -> bool:
        return self.answer is None and self.ended is None

    @property
    def lost(self) -> bool:
        """It waited in vain for another rank."""
        return bool(self.answer and self.answer.get("lost"))

    @property
    def failed(self) -> bool:
        return self.answer is not None and self.answer["outcome"] != Outcome.PASS.value

    def judge(self) -> None:
        """Raise what the answer says; nothing for a pass, or no answer."""
        if self.failed:
            assert self.answer is not None
            raise _RAISED[self.answer["outcome"]](f"rank {self.index}: {self.answer['message']}")

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen when the answers are read
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> None:
        """Take in what there is; called when there is something."""
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            code = self.process.wait()
            known = -code in set(signal.Signals)
            self.ended = f"died with {signal.Signals(-code).name if known else f'exit code {code}'}"
            return
        *lines, self.partial = (self.partial + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{"):
                self.answer = json.loads(line)


@dataclass
class Ranks:
    """`count` ranks of the backend of `source`; made once, used by several cases."""

    source: dict[str, Any]
    folder: Path
    count: int = 2
    scale: float = 1.0
    alive: bool = field(default=False, init=False)
    _ranks: list[Rank] = field(default_factory=list, init=False)
    _groups: int = field(default=0, init=False)

    def check(self, name: str, group_seconds: float = GROUP_SECONDS, grace: float = GRACE_SECONDS) -> list[Rank]:
        """Let all ranks join a group and run a check. The ranks, each with its answer or its end.

        Once one has ended or failed, the others have `grace` seconds left. Raises ProcessHung when a rank does not
        answer and no other one is the reason.
        """
        if not self.alive:
            self._start()
        self._groups += 1
        place = self.folder / f"rendezvous-{os.getpid()}-{self._groups}"
        task = {"check": name, "init_method": place.as_uri(), "timeout_s": group_seconds * self.scale}
        for rank in self._ranks:
            rank.answer = None
            rank.send(task)
        self._listen((CHECK_SECONDS + group_seconds) * self.scale, grace * self.scale, name)
        return self._ranks

    def _start(self) -> None:
        self._ranks = []
        for index in range(self.count):
            command = [sys.executable, "-m", "enginecore.testing.ranks"]
            # In the group of this process, so that it ends with it; what the plugin prints there goes to stderr.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._ranks.append(Rank(index, process))
            self._ranks[-1].send({"source": self.source, "rank": index, "count": self.count})
        self.alive = True
        self._listen(START_SECONDS * self.scale, GRACE_SECONDS * self.scale, "being made")
        for rank in self._ranks:
            if rank.ended or rank.failed:
                self.close()
            if rank.ended:
                raise ProcessDied(f"rank {rank.index} {rank.ended} when its backend was made")
            rank.judge()

    def _listen(self, seconds: float, grace: float, what: str) -> None:
        """Until every rank has answered or ended."""
        deadline = time.monotonic() + seconds
        with DefaultSelector() as selector:
            for rank in self._ranks:
                assert rank.process.stdout is not None
                selector.register(rank.process.stdout, EVENT_READ, rank)
            while any(rank.silent for rank in self._ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    key.data.read()
                    if key.data.ended:
                        selector.unregister(key.fileobj)
                        self.alive = False
                if ready and any(rank.ended or rank.failed for rank in self._ranks):
                    deadline = min(deadline, time.monotonic() + grace)
                if not ready and time.monotonic() >= deadline:
                    break
        silent = [f"rank {rank.index}" for rank in self._ranks if rank.silent]
        if not silent:
            return
        self.close()
        if not any(rank.ended or (rank.failed and not rank.lost) for rank in self._ranks):
            others = "".join(f" (rank {r.index}: {r.answer['message']})" for r in self._ranks if r.failed and r.answer)
            raise ProcessHung(f"{' and '.join(silent)} did not answer {what} in {seconds:.0f} s and was killed{others}")

    def close(self) -> None:
        """End the processes; one that does not want to is killed."""
        self.alive = False
        for rank in self._ranks:
            rank.process.kill()
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Group:
    """What a check has in a rank: who it is, the communicator, and every rank's numbers."""

    def __init__(self, backend: Any, rank: int, count: int, check: str) -> None:
        self.backend, self.rank, self.count, self._check = backend, rank, count, check
        self.communicator: Any = None
        self.timeout_s = 0.0
        self.device = backend.torch_device()

    def join(self, init_method: str, timeout_s: float) -> None:
        from enginecore.device import GroupSpec

        self.timeout_s = timeout_s
        group = GroupSpec(rank=self.rank, world_size=self.count, init_method=init_method, timeout_s=timeout_s)
        self.communicator = self.backend.communicator(group)

    def numbers(self, rank: int, shape: tuple[int, ...], dtype: str) -> Any:
        """What `rank` has: whole numbers from -4 to 4, so that sums are exact in every dtype."""
        import torch

        seed = zlib.crc32(f"{self._check} {rank} {shape} {dtype}".encode())
        host = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed))
        return host.to(getattr(torch, dtype)).to(self.device)

    def all_numbers(self, shape: tuple[int, ...], dtype: str) -> list[Any]:
        return [self.numbers(rank, shape, dtype) for rank in range(self.count)]

    def equal(self, found: Any, expected: Any, what: str) -> None:
        import torch

        self.backend.synchronize()
        if found.dtype != expected.dtype or found.shape != expected.shape:
            told = f"{found.dtype} {tuple(found.shape)} and not {expected.dtype} {tuple(expected.shape)}"
            raise AssertionError(f"{what}: it is {told}")
        if not torch.equal(found, expected):
            wrong = int((found != expected).sum())
            raise AssertionError(f"{what}: {wrong} of {found.numel()} numbers are wrong")


def _attach(backend: Any, rank: int) -> None:
    """Each rank has a device of its own, or they share one where the backend says that they can."""
    from enginecore.errors import DriverMissingError

    try:
        backend.set_device(0 if backend.capabilities.ranks_share_device else rank)
    except DriverMissingError as error:
        raise DeclaredUnsupported(f"ranks have a device each, and {rank + 1} are not here: {error}") from error


def _perform(backend: Any, rank: int, count: int, task: dict[str, Any]) -> dict[str, Any]:
    """Join, check, leave: the answer. `lost` says that a peer was waited for in vain."""
    from enginecore.device import CollectiveError
    from enginecore.testing.cases.collectives import CHECKS
    from enginecore.testing.worker import judge

    group = Group(backend, rank, count, task["check"])
    lost = False

    def run() -> None:
        nonlocal lost
        try:
            group.join(task["init_method"], task["timeout_s"])
            CHECKS[task["check"]](group)
        except CollectiveError:
            lost = True
            raise

    outcome, message = judge(run)
    if group.communicator is not None:
        group.communicator.destroy()
    return {"outcome": outcome, "message": message, "lost": lost}


def main() -> None:
    """The life of a rank: make the backend, then a group and a check at a time until standard input ends."""
    from enginecore.testing.source import BackendSource
    from enginecore.testing.worker import judge

    answer_fd = os.dup(1)
    os.dup2(2, 1)

    def answer(told: dict[str, Any]) -> None:
        os.write(answer_fd, json.dumps(told).encode() + b"\n")

    task = json.loads(sys.stdin.readline())
    rank, count = task["rank"], task["count"]
    backend, _, _ = BackendSource(**task["source"]).create()
    outcome, message = judge(lambda: _attach(backend, rank))
    answer({"outcome": outcome, "message": message})
    for line in sys.stdin:
        answer(_perform(backend, rank, count, json.loads(line)))
    os._exit(0)


if __name__ == "__main__":
    main()
