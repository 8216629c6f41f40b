"""Captured steps of the CPU: the kernel calls of a step on a tape, run again without Python between them.

While a step is captured its kernels are written down and not run; what torch itself does is told apart by its
dispatcher: memory comes from one arena and is given back as the step lets go of it, so that a replay touches as little
memory as the step did; views cost nothing; the few other operations are run again between stretches of the tape. A step
in which torch does more than that runs eagerly, through the same kernels, with the same bits.

Of many batch sizes the largest and that of one sequence are written down at once, each of the others when it comes up
for the first time: a third of a second of start-up becomes a hundredth of one step. The largest shows whether there is
a tape at all and what memory all of them need.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from enginecore.device.graphs import GraphKey, GraphRunner
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

#: Batch sizes above run eagerly: what Python costs beside so much work is lost in it.
LARGEST = 64
#: Operations of torch itself that one step may need: looking up an embedding, choosing the rows of logits.
MOST_TORCH_CALLS = 8

_ALIGN = 64
_REGION = 1 << 20
_EMPTY = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


class Arena:
    """Memory that all captured steps share: one replay at a time uses it. Grows by whole regions, which stay."""

    def __init__(self) -> None:
        self._regions: list[mmap.mmap] = []
        #: The largest result of torch's own, which lies elsewhere until it is copied here.
        self.passing = 0
        self.forget()

    @property
    def nbytes(self) -> int:
        return sum(len(region) for region in self._regions) + self.passing

    def forget(self) -> None:
        """Another step begins: everything may be used anew."""
        self._region, self._at = 0, 0
        #: By size: where a tensor of this step lay, and whether it still does.
        self._places: dict[int, list[tuple[int, int, StorageWeakRef]]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in memory that no living tensor of this step uses."""
        count = math.prod(shape)
        size = -(-max(1, count * dtype.itemsize) // _ALIGN) * _ALIGN
        places = self._places.setdefault(size, [])
        free = next((place for place in places if place[2].expired()), None)
        if free is not None:
            places.remove(free)
        region, offset = self._take(size) if free is None else free[:2]
        buffer = self._regions[region]
        tensor = torch.frombuffer(buffer, dtype=dtype, count=max(count, 1), offset=offset)[:count].view(shape)
        places.append((region, offset, StorageWeakRef(tensor.untyped_storage())))
        return tensor

    def _take(self, size: int) -> tuple[int, int]:
        while self._region < len(self._regions) and self._at + size > len(self._regions[self._region]):
            self._region, self._at = self._region + 1, 0
        if self._region == len(self._regions):
            self._regions.append(mmap.mmap(-1, max(size, _REGION)))
        offset, self._at = self._at, self._at + size
        return self._region, offset


@dataclass
class Program:
    """Stretches of the tape and, between them, operations of torch: each (where on the tape, what to call).

    `step` is what it repeats, `kept` what the tape's pointers point into, beside the arena. No `tape`: it is not
    written down yet, or never will be (`eager`).
    """

    step: Callable[[], Any]
    tape: Any = None
    eager: bool = False
    torch_calls: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    output: Any = None
    kept: Any = None

    def run(self) -> Any:
        if self.eager:
            return self.step()
        at = 0
        for place, call in self.torch_calls:
            self.tape.run(at, place)
            call()
            at = place
        self.tape.run(at, len(self.tape))
        return self.output


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Sees every operation of torch while a step is captured."""

    def __init__(self, program: Program, arena: Arena, taped: Callable[[], int]) -> None:
        super().__init__()
        self._program, self._arena, self._taped = program, arena, taped

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shall keep its compiler out of `__torch_dispatch__`, for which it imports that whole: a second
        of start-up. Nothing is compiled here, and by this answer nothing is imported. Torch's own switch."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
            if name in _EMPTY:
                return self._arena.empty(tuple(result.shape), result.dtype) if result.is_contiguous() else result
        if func._schema.is_mutable:
            self._note(lambda: func(*args, **kwargs))
            return result
        if not isinstance(result, torch.Tensor):
            if _all_views(result, args):
                return result
            raise RuntimeError(f"{name} hands a value of the step to Python, which a captured step cannot")
        if _is_view(result, args):
            return result
        with torch._C._DisableTorchDispatch():
            placed = self._arena.empty(tuple(result.shape), result.dtype)
        self._arena.passing = max(self._arena.passing, result.nbytes)

        def again() -> None:
            placed.copy_(func(*args, **kwargs))

        self._note(again)
        return placed

    def _note(self, call: Callable[[], Any]) -> None:
        program = self._program
        program.torch_calls.append((self._taped(), call))
        if len(program.torch_calls) > MOST_TORCH_CALLS:
            raise RuntimeError(
                f"more than {MOST_TORCH_CALLS} operations of this model's step are torch's own, not kernels: it is "
                "not fused"
            )


def _storages(values: Any) -> set[int]:
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, (list, tuple)):
            found |= _storages(value)
    return found


def _is_view(result: torch.Tensor, args: Any) -> bool:
    return result.untyped_storage()._cdata in _storages(args)


def _all_views(result: Any, args: Any) -> bool:
    return isinstance(result, (list, tuple)) and all(isinstance(r, torch.Tensor) and _is_view(r, args) for r in result)


class CpuGraphs(GraphRunner):
    """Exact batch sizes up to LARGEST: nothing is padded, so that a replay computes what the step would."""

    needs_warm_up = False
    bytes_each = 2**21  # a tape has some kilobytes; the rest lets the arena be twice the activations

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._arena = Arena()
        #: Tokens of the largest step on a tape.
        self._largest = 0

    def sizes(self, max_num_seqs: int) -> list[int]:
        return list(range(1, min(max_num_seqs, LARGEST) + 1))

    def plan(self, keys: list[GraphKey], budget_bytes: int) -> list[GraphKey]:
        # The largest first: the arena then holds what all the others need, at most all activations and once more those
        # that torch's own operations still hold.
        fit = [key for key in keys if 2 * max(1, key.activation_bytes) <= budget_bytes]
        return sorted(fit, key=lambda key: -key.num_tokens)

    def capture(self, key: GraphKey, fn: Callable[..., Any], static_inputs: dict[str, Any]) -> Program:
        program = Program(partial(fn, **static_inputs), kept=(fn, static_inputs))
        if key.num_tokens == 1 or key.num_tokens >= self._largest:
            self._record(program)
            self._largest = max(self._largest, key.num_tokens)
        return program

    def _record(self, program: Program) -> None:
        self._arena.forget()
        self._kernels.start_tape()
        tape = None
        try:
            with _Watch(program, self._arena, self._kernels.taped):
                program.output = program.step()
        finally:
            tape = self._kernels.end_tape()
        program.tape = tape

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def replay(self, handle: Program) -> Any:
        if handle.tape is None and not handle.eager:
            try:
                self._record(handle)
            except RuntimeError as error:
                logger.warning("a batch size runs eagerly, although a larger one could be captured: %s", error)
                handle.eager = True
        return handle.run()

    def memory_bytes(self) -> int:
        return self._arena.nbytes

    def release(self) -> None:
        self._arena, self._largest = Arena(), 0
