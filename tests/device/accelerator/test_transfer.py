"""Blocks that move beside the step: the order of streams, on a device that exists only as books."""

from __future__ import annotations

import torch
from enginecore.device.accelerator import BlockMover
from enginecore.testing.fake_runtime import FakeRuntime


def mover(runtime: FakeRuntime) -> tuple[BlockMover, list[set[str]]]:
    seen: list[set[str]] = []

    def copy(src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        seen.append(runtime.work("copy"))
        for a, b in zip(src, dst, strict=True):
            for i, j in pairs:
                b[j] = a[i]

    return BlockMover(runtime, copy), seen


def test_a_copy_waits_for_the_step_that_wrote_and_holds_up_nothing_else() -> None:
    runtime = FakeRuntime()
    move, seen = mover(runtime)
    src, dst = [torch.arange(4.0)], [torch.zeros(4)]
    runtime.work("step that writes")
    transfer = move.start(src, dst, [(1, 2)])
    assert "step that writes" in seen[0]
    assert "copy" not in runtime.work("step beside it")
    assert not transfer.done()
    transfer.before_next_step()
    assert "copy" in runtime.work("step that reads")
    assert "copy" not in runtime.host.history
    transfer.synchronize()
    assert transfer.done() and "copy" in runtime.host.history
    assert dst[0].tolist() == [0, 0, 1, 0]


def test_two_copies_keep_their_order_and_share_a_stream() -> None:
    runtime = FakeRuntime()
    move, seen = mover(runtime)
    move.start([torch.ones(2)], [torch.ones(2)], [(0, 0)])
    runtime.work("later step")
    move.start([torch.ones(2)], [torch.ones(2)], [(0, 0)])
    assert {"copy", "later step"} <= seen[1]


def test_a_caller_that_knows_no_streams_sees_the_copy() -> None:
    runtime = FakeRuntime()
    runtime.kind = "meta"  # the targets, on the host, are not on the device
    move, _ = mover(runtime)
    move.swap([torch.ones(2)], [torch.ones(2)], [(0, 1)])
    assert "copy" in runtime.work("next step") and "copy" in runtime.host.history
    move.swap([], [], [])
