"""F14: when the engine is gone, /health says so, nobody waits for an answer that cannot come, and the server ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from enginecore_sim import RAISE_PROMPT

from tests.field.support import COMPLETIONS, ONE_THREAD, InFlight, gauges, post_raw, token_prompt, wait_until
from tests.server.checkers import check_error, parse_events
from tests.serving import ServerProcess

OPTIONS = ("--max-model-len", "1024", "--num-blocks", "256", "--device-option", "step_time_s=0.01")


def _kill(server: ServerProcess) -> None:
    """As the kernel does when memory runs out."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    (engine,) = [child for child in children if "enginecore.engine.process" in child.cmdline()]
    engine.kill()


def _raise(server: ServerProcess) -> None:
    """A step that raises: the simulated device does so when it meets this prompt."""
    with contextlib.suppress(httpx.HTTPError):
        server.post(COMPLETIONS, {"prompt": [*RAISE_PROMPT], "max_tokens": 1, "n": 1}, timeout=30)


@pytest.mark.parametrize(("end", "seats"), [(_kill, 2), (_raise, 4)], ids=["killed", "raised"])
def test_everyone_is_told(end: Callable[[ServerProcess], None], seats: int, tmp_path: Path) -> None:
    """Two streams run; a plain request waits, or runs beside them where the engine needs a seat for what ends it."""
    options = (*OPTIONS, "--max-num-seqs", str(seats))
    server = ServerProcess(*options, device="sim", log=tmp_path / "log", env=ONE_THREAD)
    with contextlib.closing(_Killed(server)):
        _starting(server)

        def ask(prompt: list[int], stream: bool) -> tuple[int, str]:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": stream}
            answer = server.post(COMPLETIONS, body, timeout=60)
            return answer.status_code, answer.text

        calls = [lambda i=i: ask(token_prompt(1400 + i, 20), i < 2) for i in range(3)]
        with InFlight(calls) as flight:
            wait_until(lambda: sum(gauges(server)[:2]) == 3 and gauges(server)[0] == min(seats, 3), "all are in")
            end(server)
            told = time.monotonic()
            codes = set()
            while time.monotonic() < told + 20:
                try:
                    health = server.http.get("/health", timeout=5).status_code
                except httpx.TransportError:
                    break  # the process has ended
                codes.add(health)
                if health == 503:
                    error = check_error(*_status(post_raw(server, COMPLETIONS, b'{"prompt": "a"}')), 503)
                    assert error["code"] == "engine_dead"
                    break
                time.sleep(0.1)
            assert 503 in codes, codes
        for status, text in flight.results[:2]:
            events = parse_events(text)
            assert status == 200 and events[-1]["error"]["code"] == "engine_dead", events[-1]
        status, text = flight.results[2]
        assert check_error(status, text, 500)["code"] == "engine_dead"
        assert server.process.wait(30) not in (0, None)
        assert "Traceback" not in text


def _status(answer: httpx.Response) -> tuple[int, bytes]:
    return answer.status_code, answer.content


def _starting(server: ServerProcess) -> None:
    """Until it is ready the server refuses connections or says 503, and then it stays 200."""
    seen = []
    while True:
        try:
            seen.append(server.http.get("/health", timeout=5).status_code)
        except httpx.TransportError:
            seen.append(0)
        if seen[-1] == 200:
            break
        assert server.process.poll() is None and len(seen) < 3000, server.log.read_text()
        time.sleep(0.05)
    assert set(seen[:-1]) <= {0, 503}


class _Killed:
    """Leaves no process behind, whatever the test did."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def close(self) -> None:
        self._server.kill()
