"""What the routes share: the engine, the settings, the metrics, the queue limit and whether the server is closing."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from enginecore.adapters import AdapterKey
from enginecore.errors import ParameterError, QueueFullError
from enginecore.frontend.async_llm import AsyncLLM
from enginecore.frontend.fingerprint import fingerprint, with_adapter
from enginecore.frontend.tools.plan import find_dialect
from enginecore.metrics import Metrics
from enginecore.server.args import ServerArgs
from enginecore.server.errors import ApiError
from enginecore.server.keys import Keyring
from enginecore.server.responses_store import ResponseStore

#: Fingerprints of answers with adapters that are kept, so that clients can look them up.
MAX_FINGERPRINTS = 256


class ServerState:
    """One per app. `in_flight` counts HTTP requests that shutting down waits for."""

    def __init__(self, llm: AsyncLLM, args: ServerArgs, max_waiting: int) -> None:
        self.llm = llm
        self.args = args
        self.created = int(time.time())
        self.model_name = llm.config.served_model_name
        self.metrics = llm.observer if isinstance(llm.observer, Metrics) else self._own_metrics(llm)
        self.metrics.stats = lambda: llm.stats
        self.keys = Keyring(args)
        self.responses = ResponseStore(args.max_stored_responses, args.max_stored_bytes)
        self.dialect = find_dialect(llm.renderer.source, llm.tokenizer, args.tool_call_parser, args.reasoning_parser)
        self.draining = False
        #: Set by /sleep: what is to be generated is refused until /wake_up.
        self.asleep = False
        self._fingerprints: dict[AdapterKey, dict[str, Any]] = {}
        self.in_flight = 0
        self._reserved = 0
        self._max_sequences = llm.config.max_num_seqs + max_waiting

    def _own_metrics(self, llm: AsyncLLM) -> Metrics:
        return Metrics(self.model_name, llm.config.num_blocks)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What can change a result, with its `id`. Slow the first time."""
        llm = self.llm
        return fingerprint(llm.ready, tokenizer=llm.tokenizer, chat_template=llm.renderer.source, defaults=llm.defaults)

    def fingerprint_id(self, adapter: AdapterKey | None = None) -> str:
        """The name of the fingerprint of answers that an adapter has a part in, or none."""
        if adapter is None:
            return str(self.fingerprint["id"])
        known = self._fingerprints.get(adapter)
        if known is None:
            info = self.llm.adapters.get(adapter[0])
            if info is None or info.key != adapter:  # it was unloaded a moment ago
                return str(self.fingerprint["id"])
            known = self._fingerprints[adapter] = with_adapter(self.fingerprint, info)
            if len(self._fingerprints) > MAX_FINGERPRINTS:
                del self._fingerprints[next(iter(self._fingerprints))]
        return str(known["id"])

    def find_fingerprint(self, name: str) -> dict[str, Any] | None:
        """The fingerprint of that name, among this server's and those of adapters that have answered."""
        return next((each for each in (self.fingerprint, *self._fingerprints.values()) if each["id"] == name), None)

    @property
    def ready(self) -> bool:
        return self.llm.alive and not self.draining

    def check_ready(self) -> None:
        """Refuse new work with a 503 while the engine is gone or the server is closing."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
        if not self.llm.alive:
            raise ApiError(503, "the engine is not running", code="engine_dead")

    def check_model(self, model: str | None) -> None:
        """A request may leave the model out, but not ask for another one."""
        if model is not None and model != self.model_name:
            told = f"the model {model[:256]!r} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, told, param="model", code="model_not_found")

    def adapter_of(self, model: str | None) -> AdapterKey | None:
        """The adapter that a request asks for by its name, None for the model itself. 404 for anything else."""
        info = self.llm.adapters.get(model) if model is not None else None
        if info is None:
            self.check_model(model)
            return None
        return info.key

    @contextlib.contextmanager
    def reserve(self, count: int) -> Iterator[Callable[[], None]]:
        """Room for `count` sequences, or QueueFullError at once. Call what it yields when the engine has them, which
        then counts them itself until they end."""
        if self.asleep:
            raise ApiError(503, "the engine is asleep until POST /wake_up", code="asleep")
        taken = self.llm.num_sequences + self._reserved
        if taken + count > self._max_sequences:
            raise QueueFullError(
                f"the queue is full: {taken} sequences are running or waiting, at most {self._max_sequences} may be, "
                f"and this request has {count}"
            )
        self._reserved += count
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._reserved -= count

        try:
            yield release
        finally:
            release()


def check_prompt_count(prompts: int, limit: int = 4096) -> None:
    """A bound on the prompts of one request."""
    if prompts > limit:
        raise ParameterError(f"a request may hold at most {limit} prompts, got {prompts}", param="prompt")
