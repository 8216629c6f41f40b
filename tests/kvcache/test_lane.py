"""Work beside the engine's thread: in order, urgent things first, failures contained, an end that comes."""

from __future__ import annotations

import logging
import threading

import pytest
from enginecore.kvcache.lane import Finish, Results, ThreadLane


def job(done: list[str], name: str, started: threading.Event | None = None, go: threading.Event | None = None):  # type: ignore[no-untyped-def]
    def run() -> Finish:
        if started is not None:
            started.set()
        if go is not None:
            assert go.wait(10)
        return lambda: done.append(name)

    return run


def drain(results: Results, lane: ThreadLane) -> None:
    while lane.backlog:
        results.wait(0.1)
    results.drain()


def test_order_and_whose_thread_keeps_the_books() -> None:
    results, done, threads = Results(), [], []
    lane = ThreadLane("test", results, lambda: threads.append(threading.get_ident()))
    started, go = threading.Event(), threading.Event()
    nothing: Finish = lambda: None  # noqa: E731
    lane.submit(job(done, "running", started, go), nothing)
    assert started.wait(10)
    for name in ("a", "b"):
        lane.submit(job(done, name), nothing)
    for name in ("u", "v"):
        lane.submit(job(done, name), nothing, first=True)
    assert lane.backlog == 5 and not results.drain()
    go.set()
    drain(results, lane)
    assert done == ["running", "u", "v", "a", "b"]
    assert threads and threads[0] != threading.get_ident()
    lane.close(5)


def test_a_job_that_fails_is_a_warning_and_its_other_end(caplog: pytest.LogCaptureFixture) -> None:
    results, done = Results(), []
    lane = ThreadLane("test", results)

    def fail() -> Finish:
        raise OSError("broken pipe")

    with caplog.at_level(logging.WARNING, "enginecore"):
        lane.submit(fail, lambda: done.append("failed"))
        lane.submit(job(done, "next"), lambda: None)
        drain(results, lane)
    assert done == ["failed", "next"] and "broken pipe" in caplog.text
    lane.close(5)


def test_closing_does_what_is_queued_or_stops_when_the_time_is_over() -> None:
    results, done = Results(), []
    lane = ThreadLane("test", results)
    for i in range(50):
        lane.submit(job(done, str(i)), lambda: None)
    lane.close(10)
    results.drain()
    assert len(done) == 50
    lane = ThreadLane("test", results)
    started, go = threading.Event(), threading.Event()
    lane.submit(job(done, "slow", started, go), lambda: None)
    lane.submit(job(done, "never"), lambda: None)
    assert started.wait(10)
    threading.Timer(0.2, go.set).start()
    lane.close(0)
    results.drain()
    assert "slow" in done and "never" not in done and not lane._thread.is_alive()
