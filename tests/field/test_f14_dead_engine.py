"""F14: when the engine is gone, /health says so, nobody waits for an answer that cannot come, and the server ends."""

from __future__ import annotations

import contextlib
import functools
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

        streams = [functools.partial(ask, token_prompt(1400 + index, 20), True) for index in range(2)]
        with InFlight(streams) as streaming:
            wait_until(lambda: gauges(server)[0] == 2, "the streams run")
            with InFlight([functools.partial(ask, token_prompt(1402, 20), False)]) as plain:
                wait_until(lambda: sum(gauges(server)[:2]) == 3, "the plain request is in")
                end(server)
                _sick(server)
        for status, text in streaming.results:
            assert status == 200 and parse_events(text)[-1]["error"]["code"] == "engine_dead", text[-500:]
        ((status, text),) = plain.results
        assert check_error(status, text, 500)["code"] == "engine_dead"
        assert server.process.wait(30) not in (0, None)


def _sick(server: ServerProcess) -> None:
    """/health turns 503, and so does everything new, before the process ends."""
    codes: list[int] = []
    while not codes or codes[-1] == 200:
        assert len(codes) < 100, "healthy for ten seconds without an engine"
        time.sleep(0.1)
        codes.append(server.http.get("/health").status_code)
    assert codes[-1] == 503
    answer = post_raw(server, COMPLETIONS, b'{"prompt": "a"}')
    assert check_error(answer.status_code, answer.content, 503)["code"] == "engine_dead"


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
