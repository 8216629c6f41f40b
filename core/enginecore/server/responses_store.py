"""Responses that are kept, so that they can be fetched, continued or cancelled: the most recently used ones, up to a
number and a size."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from enginecore.server.errors import ApiError

FINAL = frozenset({"completed", "incomplete", "failed", "cancelled"})


@dataclass(slots=True)
class Stored:
    """A response with the items that it answers. `owner` is the name of the key that made it, and nobody else finds it.

    A background response has a `task` while it runs, and `events`, which grow until it has ended.
    """

    owner: str
    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int = 0
    task: asyncio.Task[None] | None = None
    events: list[bytes] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended(self) -> bool:
        return self.response["status"] in FINAL

    def notify(self) -> None:
        """Wake whoever follows the events."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events behind number `after`, those to come included."""
        assert self.events is not None
        position = after + 1
        while True:
            waiter = self.changed
            while position < len(self.events):
                yield self.events[position]
                position += 1
            if self.ended and position >= len(self.events):
                return
            await waiter.wait()


class ResponseStore:
    """At most `max_count` responses of at most `max_bytes` as JSON. Those that run are not dropped."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count, self._max_bytes = max_count, max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def size(self) -> int:
        return self._bytes

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: Stored) -> None:
        """Keep a response, or measure it anew, and drop the least recently used ones that are too many."""
        response_id: str = stored.response["id"]
        self._forget(response_id)
        stored.size = len(msgspec.json.encode([stored.response, stored.items])) + sum(map(len, stored.events or ()))
        if stored.ended and stored.size > self._max_bytes:
            return  # it would drive out all the others
        self._stored[response_id] = stored
        self._bytes += stored.size
        for other, entry in list(self._stored.items()):
            if len(self._stored) <= self._max_count and self._bytes <= self._max_bytes:
                break
            if entry.ended:
                self._forget(other)

    def get(self, response_id: str, owner: str, param: str | None = None) -> Stored:
        """The response, which is then the most recently used one. ApiError 404."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            shown = response_id[:128]
            raise ApiError(404, f"there is no response {shown!r}", param=param, code="response_not_found")
        self._stored.move_to_end(response_id)
        return stored

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, after ending it when it runs."""
        stored = self.get(response_id, owner)
        if stored.task is not None:
            stored.task.cancel()
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size
