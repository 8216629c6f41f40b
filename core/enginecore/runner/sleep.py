"""Giving a device's memory back while nobody asks for anything, and taking it again.

Weights go to host memory and keep their values; the KV cache loses its content; graphs are dropped, because they have
recorded addresses, and captured again. Whoever puts a model to sleep forgets its cached prefixes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import torch

from enginecore.device import Backend, MemoryManager
from enginecore.errors import UnsupportedError
from enginecore.runner.graphs import GraphedModel
from enginecore.runner.model import PagedModel, StepModel

#: Objects that hold no tensors of a model, or whole modules of the interpreter.
_SKIPPED = (str, bytes, int, float, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType, torch.dtype)


class Sleeper:
    """Puts `model` on `backend` to sleep. Raises UnsupportedError where the device's plugin cannot."""

    def __init__(self, backend: Backend, model: StepModel) -> None:
        paged = model.paged if isinstance(model, GraphedModel) else model
        if not isinstance(paged, PagedModel) or type(backend.memory).sleep is MemoryManager.sleep:
            raise UnsupportedError("the device's plugin cannot give memory back while idle")
        self._memory, self._graphed = backend.memory, model if isinstance(model, GraphedModel) else None
        weights = [tensor for tensor in tensors_of(paged.model) if tensor.device == backend.torch_device()]
        self._state: dict[str, Any] = {"kv_caches": paged.kv_caches, "weights": weights}

    def sleep(self) -> None:
        if self._graphed is not None:
            self._graphed.release()
        self._memory.sleep(self._state)

    def wake(self) -> None:
        """Raises OutOfDeviceMemory, and may be tried again, when others have taken the memory."""
        self._memory.wake(self._state)
        if self._graphed is not None:
            self._graphed.capture()


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
