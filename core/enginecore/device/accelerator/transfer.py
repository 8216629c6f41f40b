"""Blocks that move between device and host beside the model's step.

    compute stream:  ... step n (writes block) | record A        step n+1 ...      | wait B | step that reads the copy
    side stream:                                 wait A | copy block | record B

The copy never starts before the step that wrote the block has ended (A), and nobody who waits for the transfer reads
before it is whole (B). The host waits only when it wants to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from enginecore.device.accelerator.runtime import Event, Runtime

if TYPE_CHECKING:
    import torch

Pairs = list[tuple[int, int]]
Copy = Callable[["list[torch.Tensor]", "list[torch.Tensor]", Pairs], None]


class Transfer:
    """A copy that is under way. It keeps its tensors alive until it is over."""

    def __init__(self, done: Event, tensors: list[Any]) -> None:
        self._done, self._tensors = done, tensors

    def done(self) -> bool:
        return self._done.query()

    def before_next_step(self) -> None:
        """Work given to the current stream from now on waits for the copy; the host does not."""
        self._done.wait()

    def synchronize(self) -> None:
        """Wait on the host, as one must before it reads the copy."""
        self._done.synchronize()
        self._tensors = []


class BlockMover:
    """Runs `copy(src, dst, pairs)`, a backend's `swap_blocks`, on a stream of its own."""

    def __init__(self, runtime: Runtime, copy: Copy) -> None:
        self._runtime, self._copy = runtime, copy
        self._stream: Any = None

    def start(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: Pairs) -> Transfer:
        """Begin to copy block i of `src` to block j of `dst` for each (i, j). A block that is copied away may be
        overwritten once the transfer is done; host tensors should be pinned, or the copy holds up the host."""
        runtime = self._runtime
        if self._stream is None:
            self._stream = runtime.new_stream()
        written = runtime.new_event()
        written.record()
        written.wait(self._stream)
        with runtime.on_stream(self._stream):
            self._copy(src, dst, pairs)
        done = runtime.new_event()
        done.record(self._stream)
        return Transfer(done, [src, dst])

    def swap(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: Pairs) -> None:
        """The same for callers that know of no streams: what they do next sees the copy, on the device or the host."""
        if not pairs:
            return
        transfer = self.start(src, dst, pairs)
        transfer.before_next_step()
        if dst[0].device.type != self._runtime.kind:
            transfer.synchronize()
