"""A soak: 16 requests in flight, a third of the clients hang up. 12 seconds here; SOAK_SECONDS=60 for the full run.

Whatever the others do, who stays gets the text of a solo run; afterwards every block is free again, and memory has not
grown from the first half to the second. The pool is as small as one sequence of the longest length permits, so that
some are preempted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serving import SMALL, ServerProcess

SECONDS = float(os.environ.get("SOAK_SECONDS", "12"))
IN_FLIGHT = 16
#: How much the median of the second half may lie above that of the first: caches of allocators, not a leak.
GROWTH = 24 * 2**20

#: Short and long prompts, with prefixes in common and without.
PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "The lighthouse keeper climbed the stairs. " * 6 + "At the top he",
    "The lighthouse keeper climbed the stairs. " * 6 + "Outside the wind",
    "List of colours: red, green,",
    "Q: What is water made of?\nA:",
    "def add(a, b):\n    return",
    "The lighthouse keeper climbed the stairs. " * 12 + "In the evening",
]
LENGTHS = (4, 12, 32)


class _Soak:
    """What the clients share."""

    def __init__(self, server: ServerProcess, alone: dict[tuple[str, int], str]) -> None:
        self._server = server
        self._alone = alone
        self._end = time.monotonic() + SECONDS
        self._lock = threading.Lock()
        self.survivors = self.hung_up = 0
        self.failures: list[str] = []

    def client(self, number: int) -> None:
        """Ask one thing after another until the time is up."""
        chance = random.Random(number)
        while time.monotonic() < self._end:
            prompt, length = chance.choice(PROMPTS), chance.choice(LENGTHS)
            hangs_up, streams = chance.random() < 1 / 3, chance.random() < 0.5
            try:
                if hangs_up:
                    self._hang_up(prompt, chance)
                else:
                    self._stay(prompt, length, streams)
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}"[:500])

    def _hang_up(self, prompt: str, chance: random.Random) -> None:
        """In mid-stream, or before the first byte."""
        body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        if chance.random() < 0.5:
            with self._server.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                assert answer.status_code == 200, answer.read()
                for _ in itertools.islice(answer.iter_lines(), 2 * chance.randrange(1, 6)):
                    pass
        else:
            with contextlib.suppress(httpx.ReadTimeout):
                self._server.post("/v1/completions", body, timeout=chance.uniform(0.01, 0.5))
        with self._lock:
            self.hung_up += 1

    def _stay(self, prompt: str, length: int, streams: bool) -> None:
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "stream": streams}
        answer = self._server.post("/v1/completions", body, timeout=120)
        assert answer.status_code == 200, answer.text
        if streams:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
        else:
            text = answer.json()["choices"][0]["text"]
        assert text == self._alone[prompt, length], f"{text!r} is not {self._alone[prompt, length]!r}"
        with self._lock:
            self.survivors += 1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300 + 3 * SECONDS)
def test_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*SMALL, "--max-num-seqs", str(IN_FLIGHT), "--max-model-len", "384", "--num-blocks", "24")
    with ServerProcess(*options, log=tmp_path / "log", env={"OMP_WAIT_POLICY": "PASSIVE"}) as server:
        alone = {}
        for prompt in PROMPTS:
            full = server.complete(prompt=prompt, max_tokens=max(LENGTHS), return_token_ids=True, logprobs=0)
            pieces = full["choices"][0]["logprobs"]["tokens"]
            alone.update({(prompt, length): "".join(pieces[:length]) for length in LENGTHS})
        soak = _Soak(server, alone)
        memory: list[int] = []
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            clients = [pool.submit(soak.client, number) for number in range(IN_FLIGHT)]
            while not all(client.done() for client in clients):
                memory.append(server.resident_bytes())
                time.sleep(0.25)
            for client in clients:
                client.result()
        _settle(server)
        metrics = server.metrics()
    assert not soak.failures, soak.failures[:5]
    assert soak.survivors >= IN_FLIGHT and soak.hung_up >= IN_FLIGHT // 4
    assert metrics["enginecore:prefix_cache_hits_total"] > 0 and metrics["enginecore:num_preemptions_total"] > 0
    warm = memory[len(memory) // 5 :]  # the first requests fill allocators and the cache's pages
    halves = [statistics.median(half) for half in (warm[: len(warm) // 2], warm[len(warm) // 2 :])]
    with capsys.disabled():
        print(
            f"\nsoak of {SECONDS:g} s: {soak.survivors} answered, {soak.hung_up} hung up, 0 failed, "
            f"{metrics['enginecore:num_preemptions_total']:g} preemptions, "
            f"resident {halves[0] / 2**20:.0f} MiB, then {halves[1] / 2**20:.0f} MiB"
        )
    assert halves[1] - halves[0] < GROWTH


def _settle(server: ServerProcess) -> None:
    """Until nothing runs, nothing waits and every block is free."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + 15
    while any(server.metrics()[f"enginecore:{name}"] for name in names):
        assert time.monotonic() < deadline, server.metrics()
        time.sleep(0.05)
