"""Where one consumer waits for the outputs of its requests."""

from __future__ import annotations

import asyncio

from enginecore.frontend.outputs import RequestOutput


class Collector:
    """A sink for one consumer task. What arrives while it is busy is merged, so a slow reader gets one larger delta.

    `deltas` False keeps only the newest output of each request, which is right for cumulative and final outputs.
    """

    def __init__(self, *, deltas: bool) -> None:
        self._deltas = deltas
        self._pending: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, key: int, output: RequestOutput) -> None:
        if self._deltas and key in self._pending:
            self._pending[key].merge(output)
        else:
            self._pending[key] = output
        self._wake()

    def fail(self, key: int, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[tuple[int, RequestOutput]]:
        """All that is new, by request, waiting for something if there is nothing. Raises what a request failed with."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, {}
        return list(pending.items())
