"""F13: after a mass hang-up the gauges are right without new traffic."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import httpx

from tests.field.support import (
    COMPLETIONS,
    InFlight,
    baseline,
    counter,
    gauges,
    together,
    token_prompt,
    wait_until,
)
from tests.serving import ServerProcess

STREAMS = 20


def test_gauges_after_all_hang_up(sim_server: ServerProcess) -> None:
    before = counter(sim_server, "request_success_total", finished_reason="abort")
    ended = counter(sim_server, "request_success_total")
    all_in, hang_up = threading.Barrier(STREAMS + 1), threading.Event()

    def stream(index: int) -> None:
        body = {"prompt": token_prompt(1300 + index, 9), "max_tokens": 900, "ignore_eos": True, "stream": True}
        with sim_server.http.stream("POST", COMPLETIONS, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()  # kept: letting go of it would hang up
            assert next(lines).startswith("data: ")
            all_in.wait(60)
            hang_up.wait(60)

    with InFlight([functools.partial(stream, index) for index in range(STREAMS)]):
        all_in.wait(60)
        running, waiting, usage = gauges(sim_server)
        hang_up.set()
        assert running + waiting == STREAMS and usage > 0
    baseline(sim_server)
    wait_until(
        lambda: counter(sim_server, "request_success_total", finished_reason="abort") == before + STREAMS, "counted"
    )
    assert counter(sim_server, "request_success_total") == ended + STREAMS


def test_gauges_after_waiting_ones_hang_up(tiny_server: ServerProcess) -> None:
    """With a pool for two, most of them never ran."""
    before = counter(tiny_server, "request_success_total", finished_reason="abort")
    calls = [
        {"prompt": token_prompt(1350 + index, 100), "max_tokens": 150, "ignore_eos": True} for index in range(STREAMS)
    ]

    def give_up(body: dict[str, Any]) -> None:
        with contextlib.suppress(httpx.ReadTimeout):
            tiny_server.post(COMPLETIONS, body, timeout=0.05)

    together([functools.partial(give_up, body) for body in calls])
    baseline(tiny_server)
    assert counter(tiny_server, "request_success_total", finished_reason="abort") > before
