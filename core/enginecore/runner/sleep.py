"""Giving a device's memory back while nobody asks for anything, and taking it again.

    level 1   weights go to host memory and keep their values: the device's plugin moves them
    level 2   weights are dropped, and read from their files again: any backend can

The KV cache loses its content; graphs are dropped, because they have recorded addresses, and captured again. Whoever
puts a model to sleep forgets its cached prefixes.
"""

from __future__ import annotations

import functools
import gc
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch

from enginecore.device import Backend, MemoryManager
from enginecore.errors import OutOfDeviceMemory, UnsupportedError
from enginecore.runner.graphs import GraphedModel
from enginecore.runner.model import PagedModel, StepModel

#: Objects that hold no tensors of a model, or whole modules of the interpreter.
_SKIPPED = (str, bytes, int, float, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype)


class Sleeper:
    """Puts `model` on `backend` to sleep. Raises UnsupportedError where a backend runs whole models itself."""

    def __init__(self, backend: Backend, model: StepModel) -> None:
        paged = model.paged if isinstance(model, GraphedModel) else model
        if not isinstance(paged, PagedModel):
            raise UnsupportedError("the device's plugin runs whole models itself and keeps them")
        self._backend, self._paged = backend, paged
        self._graphed = model if isinstance(model, GraphedModel) else None
        #: What `MemoryManager.wake` needs; None at level 2.
        self._state: dict[str, Any] | None = None

    def sleep(self, level: int) -> None:
        """Raises UnsupportedError where this level cannot be had; nothing has changed then."""
        if level == 1 and type(self._backend.memory).sleep is MemoryManager.sleep:
            raise UnsupportedError(
                "the device's plugin cannot move weights out of its memory while idle",
                fix="level 2 drops them and reads their files again",
            )
        if level == 2 and self._paged.reload is None:
            raise UnsupportedError(
                "sleep level 2 cannot bring this model back: it has adapters",
                fix="level 1 keeps weights in host memory",
            )
        if self._graphed is not None:
            self._graphed.release()
        if level == 1:
            weights = [
                tensor for tensor in tensors_of(self._paged.model) if tensor.device == self._backend.torch_device()
            ]
            self._state = {"kv_caches": self._paged.kv_caches, "weights": weights}
            self._backend.memory.sleep(self._state)
            return
        self._state = None
        self._backend.synchronize()
        self._backend.memory.release_kv(self._paged.kv_caches)
        self._paged.drop()
        self._free()

    def wake(self) -> None:
        """Raises OutOfDeviceMemory when others have taken the memory, ModelError when the files are gone; may be tried
        again."""
        if self._state is not None:
            self._backend.memory.wake(self._state)
            self._state = None
        else:
            self._read_again()
        if self._graphed is not None:
            self._graphed.capture()

    def _read_again(self) -> None:
        assert self._paged.reload is not None
        told: str | None = None
        try:
            self._paged.exchange(*self._paged.reload())
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold what was read until then
            if not self._backend.memory.out_of_memory(error):
                raise
            told = str(error)
        if told is not None:
            self._free()
            free = self._backend.memory.memory_info().free_bytes
            raise OutOfDeviceMemory(
                f"the weights and the cache do not fit: {free} bytes are free ({told})",
                fix="stop what has taken the device's memory meanwhile, then wake again",
            )

    def _free(self) -> None:
        """Modules of a model refer to each other: only the collector finds that nobody else needs them."""
        gc.collect()
        self._backend.memory.empty_cache()


def tensors_of(root: object) -> list[torch.Tensor]:
    """Every tensor that can be reached from `root` through attributes, containers and bound functions, once."""
    seen: set[int] = set()
    found: list[torch.Tensor] = []
    pending = [root]
    while pending:
        item = pending.pop()
        if isinstance(item, _SKIPPED) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        else:
            pending.extend(_inside(item))
    return found


def _inside(item: Any) -> Iterator[Any]:
    if isinstance(item, dict):
        yield from item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    elif isinstance(item, functools.partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, types.MethodType):
        yield item.__self__
    elif isinstance(item, types.FunctionType):
        yield from (cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType())
    else:
        yield getattr(item, "__dict__", {})
        for kind in type(item).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(item, name, None)
