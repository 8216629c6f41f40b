"""`AsyncLLM`: many requests at once on one engine process, from one event loop.

One task receives every step's outputs and hands them to the consumers. Tokenising and rendering run in threads. The
engine's death fails every consumer at once; a consumer that goes away takes its requests out of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from enginecore.adapters import AdapterInfo
from enginecore.config import EngineArgs, EngineConfig, ReadyInfo
from enginecore.engine.client import ProcessClient
from enginecore.errors import EngineCoreError, EngineDeadError
from enginecore.frontend.adapters import AdapterNames, load_adapter, unload_adapter
from enginecore.frontend.chat import ChatRenderer, load_template
from enginecore.frontend.collector import Collector
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.generation_config import sampling_defaults
from enginecore.frontend.input_processor import PreparedRequest, Prompt, grammar_tokenizer
from enginecore.frontend.output_processor import Observer, OutputKind
from enginecore.frontend.outputs import RequestOutput
from enginecore.frontend.pooling import processors
from enginecore.frontend.template_pool import TemplatePool
from enginecore.frontend.tenancy import current_tenant
from enginecore.frontend.tokenizer import Tokenizer
from enginecore.models.store import resolve_model
from enginecore.request import EngineStats, SamplingParams

logger = logging.getLogger("enginecore.frontend")
T = TypeVar("T")

#: Requests whose ids are kept for `explain`.
MAX_RECENT = 1024


class AsyncLLM:
    """Made by `create`, closed by `shutdown` (or as an async context manager)."""

    def __init__(
        self,
        client: Any,
        tokenizer: Any,
        args: EngineArgs,
        *,
        observer: Observer | None = None,
        sampling_overrides: dict[str, Any] | None = None,
    ) -> None:
        """Use `create`. `client` is a started ProcessClient, or anything with its methods."""
        self.client = client
        self.ready: ReadyInfo = client.ready
        self.config: EngineConfig = client.ready.config
        self.adapters = AdapterNames(client.ready.adapters)
        self.tokenizer = tokenizer
        self.table = TokenTable(tokenizer)
        self.input, self._output = processors(self.config, tokenizer, self.table, observer)
        self.stats = EngineStats(num_blocks=self.config.num_blocks, num_free_blocks=self.config.num_blocks)
        self.defaults = sampling_defaults(args.generation_config, self.config.model_path, sampling_overrides)
        #: Set once the engine is gone; `dead_error` then says why.
        self.dead = asyncio.Event()
        self.dead_error: Exception | None = None
        template = load_template(args.chat_template) or tokenizer.chat_template
        self._pool = TemplatePool(template) if template is not None else None
        self.renderer = ChatRenderer(
            template, tokenizer.special_tokens, render=self._pool.render if self._pool is not None else None
        )
        self.observer = observer
        self._threads = ThreadPoolExecutor(min(8, (os.cpu_count() or 1) + 2), thread_name_prefix="enginecore-input")
        self._receiver = asyncio.create_task(self._receive())
        self._recent: dict[str, list[str]] = {}
        self._warming: asyncio.Task[None] | None = None
        self._follows_grammars = False

    @classmethod
    async def create(
        cls,
        args: EngineArgs,
        *,
        observer: Callable[[EngineConfig], Observer] | None = None,
        sampling_overrides: dict[str, Any] | None = None,
        client: Awaitable[ProcessClient] | None = None,
        warm: bool = True,
    ) -> AsyncLLM:
        """Start the engine process and wait until the model is loaded. `observer` makes the receiver of timings.

        `client` is the process where it is starting already, with `args`; `warm` False leaves to `warm_up` what would
        be done beside the first requests."""
        load_template(args.chat_template)  # a missing file should not cost a model load
        early = asyncio.create_task(asyncio.to_thread(_load_tokenizer, args))
        try:
            started = await (ProcessClient.start(args) if client is None else client)
        except BaseException:
            early.cancel()
            raise
        try:
            config = started.ready.config
            path, tokenizer = await early
            if path != config.model_path or tokenizer is None:
                tokenizer = await asyncio.to_thread(Tokenizer.load, config.model_path)
            watcher = observer(config) if observer is not None else None
            llm = cls(started, tokenizer, args, observer=watcher, sampling_overrides=sampling_overrides)
        except BaseException:
            await started.shutdown(0)
            raise
        if warm:
            llm.warm_up()
        return llm

    def warm_up(self) -> None:
        """Begin to do what the first requests would otherwise wait for."""
        self._warming = asyncio.create_task(self._warm_up())

    async def _warm_up(self) -> None:
        """Do now, in threads, what the first request would have to wait for."""
        work = (self.off_loop(self.renderer.prepare), self.off_loop(self.table.longest))
        told, *_ = await asyncio.gather(self.off_loop(grammar_tokenizer, self.tokenizer), *work, return_exceptions=True)
        if isinstance(told, tuple) and self.alive:
            self._tell_tokenizer(*told)

    def _tell_tokenizer(self, *told: Any) -> None:
        if not self._follows_grammars:
            self._follows_grammars = True
            self.client.tell("use_tokenizer", *told)

    # ---- generation ----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        output_kind: OutputKind = "cumulative",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one prompt until it has ended, merged when the reader is slow.

        By default each output holds everything so far; "delta" gives only what is new, "final" one output. Closing the
        generator, or leaving its loop, aborts the request. `request_id` is only a label: two requests may share one.
        `adapter` names one that is loaded.
        Raises ParameterError for what is wrong with the request, EngineDeadError when the engine is gone.
        """
        params = sampling_params or SamplingParams(**self.defaults)
        self.check_alive()
        key = self.adapters.key(adapter)
        prepared = await self.off_loop(
            self.input.process, prompt, params, priority=priority, cache_salt=cache_salt, adapter=key
        )
        stream = self.stream([prepared], request_id=request_id or self.input.internal_id(), kind=output_kind)
        async with contextlib.aclosing(stream):
            async for news in stream:
                for _, output in news:
                    yield output

    async def stream(
        self, requests: Sequence[PreparedRequest], *, request_id: str, kind: OutputKind,
        submitted: Callable[[], None] | None = None,
    ) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:  # fmt: skip
        """Outputs of several prompts: lists of (index of the prompt, output) until all have ended.

        `submitted` is called once the engine has all of them. Closing the generator aborts what still runs.
        """
        collector = Collector(deltas=kind == "delta")
        internal_ids: list[str] = []
        try:
            self._submit(requests, request_id, kind, collector, internal_ids)
            if submitted is not None:
                submitted()
            unfinished = len(requests)
            while unfinished:
                news = await collector.get()
                unfinished -= sum(output.finished for _, output in news)
                yield news
        finally:
            left = self._output.abort(internal_ids)
            if left and self.alive:
                self.client.abort(left)

    def _submit(self, requests: Sequence[PreparedRequest], request_id: str, kind: OutputKind, collector: Collector,
                internal_ids: list[str]) -> None:  # fmt: skip
        self.check_alive()
        self._recent.pop(request_id, None)
        recent = self._recent[request_id] = []
        if len(self._recent) > MAX_RECENT:
            del self._recent[next(iter(self._recent))]
        tenant = current_tenant.get()
        for key, request in enumerate(requests):
            internal_ids.append(self.input.internal_id())
            for engine_request in self._output.add(
                request, request_id=request_id, internal_id=internal_ids[-1], sink=collector, kind=kind, key=key
            ):
                if engine_request.grammar is not None and not self._follows_grammars:
                    self._tell_tokenizer(*grammar_tokenizer(self.tokenizer))
                engine_request.tenant = tenant
                self.client.add(engine_request)
                recent.append(engine_request.request_id)

    async def off_loop(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run slow, thread-safe work (tokenising, rendering) in a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(function, *args, **kwargs)
        )

    # ---- state ---------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self.dead_error is None and bool(self.client.alive)

    @property
    def errored(self) -> bool:
        return not self.alive

    @property
    def num_sequences(self) -> int:
        """Sequences in flight, waiting or running."""
        count: int = self._output.num_sequences
        return count

    def check_alive(self) -> None:
        """Raise what the engine died of."""
        if self.dead_error is not None:
            raise self.dead_error
        if not self.client.alive:
            raise EngineDeadError("the engine process has ended")

    async def reset_prefix_cache(self) -> int:
        """Forget cached prefixes; returns how many blocks."""
        count: int = await self.client.call("reset_prefix_cache")
        return count

    async def memory(self) -> dict[str, int]:
        """KV blocks by state; see `Engine.memory`."""
        blocks: dict[str, int] = await self.client.call("memory")
        return blocks

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        """Serve the adapter in a folder under a name; requests in flight go on meanwhile. `in_place` replaces one of
        that name, which those that have it keep. EngineCoreError says what is wrong with it."""
        return await load_adapter(self.client, self.adapters, name, path, in_place=in_place)

    async def unload_adapter(self, name: str) -> int:
        """Stop serving an adapter; how many sequences keep it until they end."""
        return await unload_adapter(self.client, self.adapters, name)

    async def explain(self, request_id: str) -> list[dict[str, Any]] | None:
        """How the time of a request was spent, a dict for each of its sequences; None when it is not known any more.
        Of several requests with one id it is the latest."""
        engine_ids = self._recent.get(request_id)
        return None if engine_ids is None else await self.client.call("explain", engine_ids)

    def fail_all(self, error: Exception) -> None:
        """Every request in flight gets `error` and leaves the engine."""
        ids = self._output.fail_all(error)
        if ids and self.alive:
            self.client.abort(ids)

    async def _receive(self) -> None:
        """Take each step's outputs to their consumers until the engine ends."""
        try:
            while True:
                step = await self.client.recv()
                self.stats = step.stats
                for engine_id, reason in self._output.process(step).items():
                    self.client.abort([engine_id], reason)
                await asyncio.sleep(0)  # let the consumers run even when the next outputs are there already
        except asyncio.CancelledError:
            raise
        except EngineCoreError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the outputs of the engine cannot be handled")
            self._die(EngineDeadError(f"the frontend has failed: {type(error).__name__}: {error}"))

    def _die(self, error: Exception) -> None:
        logger.error("%s", error)
        self.dead_error = error
        self.dead.set()
        self._output.fail_all(error)

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Fail what is in flight, stop the engine process and the threads. Safe to call twice."""
        self.dead_error = self.dead_error or EngineDeadError("the engine was shut down")
        self._output.fail_all(self.dead_error)
        for task in (self._receiver, self._warming):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await self.client.shutdown(timeout)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.shutdown()


def _load_tokenizer(args: EngineArgs) -> tuple[str, Tokenizer | None]:
    """The tokenizer, while the engine process loads the weights: (model path, None) when that does not work yet."""
    try:
        path = resolve_model(
            args.model,
            allow_download=False,
            allow_pickle=args.allow_pickle,
            trust_remote_code=args.trust_remote_code,
        ).path
        return path, Tokenizer.load(path)
    except EngineCoreError:
        return "", None  # the engine process says what is wrong, or downloads it first
