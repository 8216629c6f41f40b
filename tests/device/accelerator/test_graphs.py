"""Captured steps in one shared pool, on a device that exists only as books."""

from __future__ import annotations

import pytest
import torch
from enginecore.device import GraphKey
from enginecore.device.accelerator import GraphCaptureError, PooledGraphs
from enginecore.device.accelerator.graphs import GRAPH_BYTES, MIB
from enginecore.testing.fake_runtime import FakeRuntime

KEYS = [GraphKey(n, n, 1, activation_bytes=n * MIB) for n in (1, 2, 4, 8)]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_small_batches_are_planned_first_and_captured_last() -> None:
    graphs = PooledGraphs(FakeRuntime())
    assert graphs.plan(KEYS, 0) == []
    assert graphs.plan(KEYS, 2**30) == KEYS[::-1]
    assert graphs.plan(KEYS, 2 * MIB + 2 * GRAPH_BYTES) == [KEYS[1], KEYS[0]]


def test_a_replay_reads_its_inputs_and_overwrites_its_output() -> None:
    graphs = PooledGraphs(FakeRuntime())
    inputs = {"x": torch.zeros(4)}
    handle = graphs.capture(KEYS[2], double, inputs)
    inputs["x"].copy_(torch.arange(4.0))
    out = graphs.replay(handle)
    assert out.tolist() == [0, 2, 4, 6]
    inputs["x"].fill_(1)
    assert graphs.replay(handle) is out and out.tolist() == [2] * 4


def test_the_pool_is_shared_and_its_true_size_corrects_the_plan() -> None:
    runtime = FakeRuntime()
    runtime.graph_bytes = 16 * MIB
    graphs = PooledGraphs(runtime)
    for key in KEYS[:1:-1]:
        graphs.capture(key, double, {"x": torch.zeros(4)})
    assert graphs.memory_bytes() == 17 * MIB  # the second found its memory in the first one's
    assert graphs.plan(KEYS[:2], 17 * MIB + 2 * MIB) == KEYS[1::-1]
    assert graphs.plan(KEYS[:2], 17 * MIB + 1 * MIB) == KEYS[:1]
    graphs.release()
    assert graphs.memory_bytes() == 0


def test_what_the_run_before_recording_left_cached_is_not_taken_for_the_graphs() -> None:
    runtime = FakeRuntime()

    def step(x: torch.Tensor) -> torch.Tensor:
        runtime.resize(runtime.allocate(8 * MIB), 0)
        return x * 2

    graphs = PooledGraphs(runtime)
    graphs.capture(KEYS[0], step, {"x": torch.ones(1)})
    assert graphs.memory_bytes() >= runtime.graph_bytes


@pytest.mark.parametrize("where", ["while recording", "at the end"])
def test_a_failed_capture_gives_its_reason_and_spoils_nothing(where: str) -> None:
    runtime = FakeRuntime()
    graphs = PooledGraphs(runtime)
    good = graphs.capture(KEYS[1], double, {"x": torch.ones(2)})
    calls = iter(range(9))

    def fails(x: torch.Tensor) -> torch.Tensor:
        if next(calls):  # the run before recording goes well
            raise RuntimeError("operation not permitted when stream is capturing")
        return x

    if where == "at the end":
        runtime.capture_fails = "operation not permitted: capture was invalidated"
    with pytest.raises(GraphCaptureError, match=r"num_seqs=4.*not permitted"):
        graphs.capture(KEYS[2], fails if where == "while recording" else double, {"x": torch.ones(4)})
    runtime.capture_fails = None
    assert runtime.current_stream() is runtime.main
    assert graphs.replay(good).tolist() == [2, 2] and graphs.memory_bytes() == runtime.graph_bytes
    assert graphs.replay(graphs.capture(KEYS[2], double, {"x": torch.ones(4)})).tolist() == [2] * 4


def test_memory_that_runs_out_in_a_capture_is_a_failed_capture() -> None:
    runtime = FakeRuntime(8 * MIB)
    runtime.graph_bytes = 9 * MIB
    graphs = PooledGraphs(runtime)
    with pytest.raises(GraphCaptureError, match="Tried to allocate"):
        graphs.capture(KEYS[0], double, {"x": torch.ones(1)})
    assert graphs.memory_bytes() == 0 and runtime.reserved_bytes() == 0


def test_inputs_are_there_before_the_run_on_another_stream() -> None:
    runtime = FakeRuntime()
    runtime.work("fill inputs")
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append((runtime.current_stream().name, runtime.work(f"step {len(seen)}")))
        return x

    PooledGraphs(runtime).capture(KEYS[0], step, {"x": torch.ones(1)})
    assert seen[0][0] != "main" and "fill inputs" in seen[0][1]
