"""The adapters that requests may name, as a frontend knows them, and how it has them loaded and unloaded."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from enginecore.adapters import AdapterInfo, AdapterKey, LoadTicket
from enginecore.errors import EngineCoreError, ParameterError

#: How often a load is asked after.
POLL_S = 0.02


class AdapterNames:
    """`key` is None for the model itself. Raises ParameterError for a name that is not loaded."""

    def __init__(self, loaded: list[AdapterInfo]) -> None:
        self._infos = {info.name: info for info in loaded}

    def get(self, name: str) -> AdapterInfo | None:
        return self._infos.get(name)

    def all(self) -> list[AdapterInfo]:
        return list(self._infos.values())

    def add(self, info: AdapterInfo) -> None:
        self._infos[info.name] = info

    def remove(self, name: str) -> None:
        self._infos.pop(name, None)

    def key(self, name: str | None) -> AdapterKey | None:
        if name is None:
            return None
        info = self._infos.get(name)
        if info is None:
            known = ", ".join(sorted(self._infos)) or "none"
            raise ParameterError(f"there is no adapter {name[:128]!r}; loaded: {known}", param="adapter")
        return info.key


async def load_adapter(client: Any, names: AdapterNames, name: str, path: str, *, in_place: bool) -> AdapterInfo:
    """Have an engine process read an adapter while it goes on, and serve it from then on. Raises EngineCoreError with
    what is wrong with it."""
    ticket = await client.call("start_loading_adapter", name, path, in_place)
    while True:
        told = msgspec.convert(await client.call("adapter_load", ticket), LoadTicket)
        if told.problem is not None:
            raise EngineCoreError(told.problem)
        if told.info is not None:
            names.add(told.info)
            return told.info
        await asyncio.sleep(POLL_S)


async def unload_adapter(client: Any, names: AdapterNames, name: str) -> int:
    """Stop serving an adapter; how many sequences keep it until they end. Raises EngineCoreError for one that is not
    known."""
    names.remove(name)  # first, so that no request is made for it any more
    left: int = await client.call("unload_adapter", name)
    return left
