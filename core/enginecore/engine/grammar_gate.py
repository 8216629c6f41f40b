"""Where requests wait whose grammar is being compiled, so that nobody else waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from enginecore.request import EngineRequest
from enginecore.runner.grammar import NO_TOKENIZER, GrammarStore

#: How long a step with nothing else to do waits for a compilation before it looks at what has come in.
WAIT_S = 0.01


class GrammarGate:
    """False when nobody waits."""

    def __init__(self, store: GrammarStore | None) -> None:
        self._store = store
        self._held: dict[str, tuple[EngineRequest, Future[str | None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, request: EngineRequest) -> None:
        """Start to compile the request's grammar, unless that is done already; `ready` gives the request back."""
        assert request.grammar is not None
        if self._store is None:
            future: Future[str | None] = Future()
            future.set_result(NO_TOKENIZER)
        else:
            future = self._store.compile(request.grammar)
        self._held[request.request_id] = (request, future)

    def ready(self, *, wait: bool) -> list[tuple[EngineRequest, str | None]]:
        """Requests whose grammar is compiled, in the order in which they came, each with why it cannot be used or None.
        `wait` for a moment when there is none."""
        futures = {future for _, future in self._held.values()}
        done = {future for future in futures if future.done()}
        if wait and not done:
            done = _wait(futures)
        ready = [(request, _problem(future)) for request, future in self._held.values() if future in done]
        for request, _ in ready:
            del self._held[request.request_id]
        return ready

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget requests; returns those that were waiting."""
        return [request_id for request_id in request_ids if self._held.pop(request_id, None) is not None]

    def use_tokenizer(self, serialized: str, eos_token_ids: list[int]) -> None:
        if self._store is not None:
            self._store.use_tokenizer(serialized, eos_token_ids)

    def warm_up(self) -> None:
        if self._store is not None:
            self._store.warm_up()

    def shutdown(self) -> None:
        if self._store is not None:
            self._store.shutdown()


def _wait(futures: set[Future[str | None]]) -> set[Future[str | None]]:
    return wait(futures, timeout=WAIT_S, return_when=FIRST_COMPLETED).done


def _problem(future: Future[str | None]) -> str | None:
    error = future.exception()
    problem = future.result() if error is None else f"{type(error).__name__}: {error}"
    return None if problem is None else f"the grammar cannot be used: {problem}"
