"""torch's device modules in one vocabulary: a module that records what it is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from enginecore.device.accelerator import TorchRuntime


class Stream:
    def __init__(self, name: str = "side") -> None:
        self.name, self.waited = name, []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


class Module:
    """As torch.cuda and torch.xpu have it; `graph` fails at its end and leaves its stream current, as torch's does."""

    Stream = Stream

    def __init__(self) -> None:
        self.current, self.calls = Stream("main"), []

    class Event:
        def __init__(self) -> None:
            self.recorded: list[Stream] = []

        def record(self, stream: Stream) -> None:
            self.recorded.append(stream)

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextlib.contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        self.calls.append(options)
        self.current = Stream("recording")
        yield
        raise RuntimeError("capture was invalidated")

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, *args))
            return (10, 100) if name == "mem_get_info" else 7

        return call


def test_every_question_names_the_selected_device() -> None:
    module = Module()
    runtime = TorchRuntime(module, "meta", "Graph")
    runtime.select(2)
    assert runtime.memory_info() == (10, 100) and runtime.reserved_bytes() == runtime.peak_bytes() == 7
    runtime.synchronize()
    runtime.reset_peak()
    names = [call[0] for call in module.calls]
    assert names == [
        "set_device", "mem_get_info", "memory_reserved", "max_memory_reserved", "synchronize", "reset_peak_memory_stats"
    ]  # fmt: skip
    assert all(call[1] == 2 for call in module.calls) and runtime.device().index == 2


def test_events_take_the_current_stream_unless_told() -> None:
    module = Module()
    event, side = TorchRuntime(module, "meta", "Graph").new_event(), Stream()
    event.record()
    event.record(side)
    event.wait(side)
    event.wait()
    assert side.waited == module.current.waited != []


def test_a_failed_recording_gives_the_stream_back() -> None:
    module = Module()
    runtime = TorchRuntime(module, "meta", "Graph", capture_error_mode="thread_local")
    before = runtime.current_stream()
    with pytest.raises(RuntimeError, match="invalidated"), runtime.capturing(object(), "pool"):  # type: ignore[arg-type]
        assert runtime.current_stream().name == "recording"
    assert runtime.current_stream() is before
    assert module.calls == [{"pool": "pool", "capture_error_mode": "thread_local"}]
