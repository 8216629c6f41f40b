"""An engine client that answers from a script, and a server around it, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpx
from enginecore.config import EngineArgs, ReadyInfo
from enginecore.errors import EngineDeadError
from enginecore.frontend.async_llm import AsyncLLM
from enginecore.metrics import Metrics
from enginecore.request import BeamAnswer, EngineOutput, EngineRequest, EngineStats, StepOutputs, TokenLogprobs
from enginecore.server.app import App, create_app
from enginecore.server.args import ServerArgs

from tests.frontend.toy import EOS, ToyTokenizer, config

#: Request -> (tokens, whether they end by themselves).
Script = Callable[[EngineRequest], "tuple[list[int], bool]"]


def parrot(request: EngineRequest) -> tuple[list[int], bool]:
    """Repeats the prompt for ever, starting one token further for every candidate."""
    prompt = request.prompt_token_ids
    start = int(request.request_id.rpartition("_")[2])
    return [prompt[(start + i) % len(prompt)] for i in range(200)], False


def saying(text: str) -> Script:
    """Says `text`, then the end token."""
    ids = ToyTokenizer().encode(text)
    return lambda request: (ids, True)


class FakeEngine:
    """One token a step for each of at most `max_num_seqs` sequences. `pause` holds all steps back."""

    def __init__(self, script: Script = parrot, *, tokens_per_step: int = 1, **settings: Any) -> None:
        self.ready = ReadyInfo(config=config(**settings), ledger={}, device_summary="toy", load_seconds=0.0)
        self.script = script
        self.alive = True
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.pause = False
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}
        self.refuse: str | None = None
        #: What the prefix cache is said to hold of every prompt.
        self.cached = 0
        self._per_step = tokens_per_step
        self._live: dict[str, tuple[EngineRequest, list[int], bool, int]] = {}
        self._news = asyncio.Event()
        self._stats_due = False
        self._preempt = 0

    def add(self, request: EngineRequest) -> None:
        if not self.alive:
            raise EngineDeadError("the engine process has ended")
        self.requests.append(request)
        tokens, ends = self.script(request)
        self._live[request.request_id] = (request, tokens, ends, 0)
        self._news.set()

    def abort(self, ids: Iterable[str], reason: str = "abort") -> None:
        for each in ids:
            self.aborted.append(each)
            self._live.pop(each, None)
        self._stats_due = True
        self._news.set()

    def die(self) -> None:
        self.alive = False
        self._news.set()

    def tell(self, method: str, *arguments: Any) -> None:
        self.calls.append((method, *arguments))

    async def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        return self.answers.get(method, 0)

    async def shutdown(self, timeout: float = 5.0) -> None:
        self.alive = False

    @property
    def num_live(self) -> int:
        return len(self._live)

    async def recv(self) -> StepOutputs:
        while True:
            await asyncio.sleep(0.001)
            if not self.alive:
                raise EngineDeadError("the engine process has ended with code 1")
            if self._stats_due or (self._live and not self.pause):
                self._stats_due = False
                return StepOutputs([] if self.pause else self._step(), self._stats())
            if not self._live:
                self._news.clear()
                await self._news.wait()

    def _stats(self) -> EngineStats:
        running = min(len(self._live), self.ready.config.max_num_seqs)
        return EngineStats(
            num_running=running, num_waiting=len(self._live) - running, num_used_blocks=running, num_blocks=64
        )

    def _step(self) -> list[EngineOutput]:
        outputs = []
        for request_id in list(self._live)[: self.ready.config.max_num_seqs]:
            request, tokens, ends, done = self._live[request_id]
            if request.params.beam is not None:
                outputs.append(_searched(request, tokens, self.cached))
                del self._live[request_id]
                continue
            if self.refuse is not None:
                outputs.append(EngineOutput(request_id, [], finish_reason="error", error=self.refuse))
                del self._live[request_id]
                continue
            count = min(self._per_step, request.max_tokens - done)
            new = [*tokens, EOS][done : done + count] if ends else tokens[done : done + count]
            output = EngineOutput(request_id, new, num_cached_tokens=self.cached)
            if not done and request.params.prompt_logprobs is not None:
                top = request.params.prompt_logprobs
                output.prompt_logprobs = [None, *(_entry(token, top) for token in request.prompt_token_ids[1:])]
            if request.params.logprobs is not None:
                output.logprobs = [_entry(token, request.params.logprobs) for token in new]
            if ends and done + len(new) > len(tokens):
                output.finish_reason = "stop"
            elif done + len(new) >= request.max_tokens:
                output.finish_reason = "length"
            self._live[request_id] = (request, tokens, ends, done + len(new))
            if output.finish_reason is not None:
                del self._live[request_id]
            outputs.append(output)
        return outputs


def _searched(request: EngineRequest, tokens: list[int], cached: int) -> EngineOutput:
    """Each answer of a beam search starts one token further."""
    assert request.params.beam is not None
    beams = []
    for i in range(request.params.beam.width):
        ids = tokens[i : i + request.max_tokens]
        entries = None
        if request.params.logprobs is not None:
            entries = [_entry(token, request.params.logprobs) for token in ids]
        beams.append(BeamAnswer(ids, -1.5 - i, -1.5 * len(ids), "length", None, entries))
    return EngineOutput(request.request_id, [], finish_reason="length", num_cached_tokens=cached, beams=beams)


def _entry(token: int, top: int) -> TokenLogprobs:
    """The chosen token is second best; the third best is impossible."""
    best = [(token + 1) % 274, token, *((token + step) % 274 for step in range(2, 12))]
    values = [-0.25, -1.5, *([float("-inf")] * 10)]
    return TokenLogprobs([token, *best[:top]], [-1.5, *values[:top]], 2)


@dataclass
class Running:
    """A server in this process."""

    app: App
    llm: AsyncLLM
    engine: FakeEngine
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text


@contextlib.asynccontextmanager
async def running(
    script: Script = parrot,
    *,
    args: ServerArgs | None = None,
    tokenizer: Any = None,
    tokens_per_step: int = 1,
    engine_args: EngineArgs | None = None,
    kind: type[FakeEngine] = FakeEngine,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A server over a fake engine of a `kind`; `settings` change its EngineConfig."""
    engine = kind(script, tokens_per_step=tokens_per_step, **settings)
    llm = AsyncLLM(
        engine, tokenizer or ToyTokenizer(), engine_args or EngineArgs(), observer=Metrics("toy", 64),
        sampling_overrides=(args or ServerArgs()).override_generation_config,
    )  # fmt: skip
    app = create_app(llm, args)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://toy", timeout=30) as http:
        try:
            yield Running(app, llm, engine, http)
        finally:
            await llm.shutdown()
