"""`serve`: the whole life of a server process, from taking the port to a clean end.

1. Bind the port, so that a taken one is known before the model is loaded. Nothing listens yet: connections are refused.
2. Start the engine process, which loads the model; import meanwhile what serves requests. Say what was chosen and where
memory goes.
3. Listen.
4. On SIGTERM or SIGINT: /health turns 503, new requests are refused, those in flight get `shutdown_timeout` seconds,
then an error. A second signal ends everything at once.
5. When the engine dies: everything in flight fails, /health is 503, and after a moment the process ends with code 1.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from enginecore.config import EngineArgs, EngineConfig, ReadyInfo
from enginecore.engine.client import ProcessClient
from enginecore.errors import EngineCoreError
from enginecore.server import grpc, tracing
from enginecore.server.args import ServerArgs
from enginecore.server.errors import ShuttingDownError
from enginecore.server.keys import Keyring

if TYPE_CHECKING:  # what serves requests is imported beside the engine's start
    import uvicorn

    from enginecore.frontend.async_llm import AsyncLLM
    from enginecore.metrics import Metrics
    from enginecore.server.app import App
    from enginecore.server.grpc.server import GrpcServer

logger = logging.getLogger("enginecore.server")

#: After the engine's death, /health answers 503 for this long before the process ends.
DEAD_LINGER_SECONDS = 3.0
#: What a second signal ends the process with.
FORCED_EXIT = 130


def serve(engine_args: EngineArgs, server_args: ServerArgs) -> int:
    """Serve until a signal or the engine's death. Returns the exit code; raises EngineCoreError when it cannot
    start."""
    _set_up_logging()
    _check(server_args)
    if server_args.chat_template is not None:
        engine_args = msgspec.structs.replace(engine_args, chat_template=server_args.chat_template)
    listener = bind(server_args.host, server_args.port)
    try:
        code = _run(_Lifetime(engine_args, server_args, listener).run())
    finally:
        listener.close()
    if code == FORCED_EXIT:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)  # no waiting for threads
    return code


def _check(args: ServerArgs) -> None:
    """Find what is wrong with the settings before a model is loaded for them."""
    Keyring(args)
    if args.otlp_traces_endpoint is not None:
        tracing.check_installed()
    if args.grpc_port is not None:
        grpc.check_installed()
        if args.grpc_port:
            bind(args.host, args.grpc_port, option="--grpc-port").close()


def bind(host: str, port: int, *, option: str = "--port") -> socket.socket:
    """A socket that holds the port but does not listen. EngineCoreError, naming the address, when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EngineCoreError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise EngineCoreError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", fix=f"choose another port with {option}"
        ) from error
    listener.setblocking(False)
    return listener


def _run(main: object) -> int:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)  # type: ignore[arg-type]
    code: int = uvloop.run(main)  # type: ignore[arg-type]
    return code


def _import_serving() -> None:
    """Import all that serves requests, so that importing it again costs nothing."""
    gc.disable()  # imports make hardly any garbage, and looking for it is a tenth of their time
    try:
        import enginecore.metrics
        import enginecore.server.app
        import enginecore.server.http
    finally:
        gc.enable()
    del enginecore


class _Lifetime:
    """One run of the server."""

    def __init__(self, engine_args: EngineArgs, args: ServerArgs, listener: socket.socket) -> None:
        self._engine_args = engine_args
        self._args = args
        self._listener = listener
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._started = time.monotonic()
        self._hashing: asyncio.Task[None]

    def _on_signal(self, name: str) -> None:
        if self._stop.is_set():
            logger.warning("%s again: ending at once", name)
            self._force.set()
        else:
            seconds = self._args.shutdown_timeout
            logger.info("%s: no new requests; those in flight have %g s to finish (again: end at once)", name, seconds)
            self._stop.set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, functools.partial(self._on_signal, signal.Signals(number).name))
        llm = await self._load()
        if llm is None:
            return FORCED_EXIT if self._force.is_set() else 0
        try:
            return await self._serve(llm)
        finally:
            await llm.shutdown(timeout=0 if self._force.is_set() or not llm.alive else 5)

    async def _load(self) -> AsyncLLM | None:
        """The engine, or None when a signal came first."""
        loading = asyncio.create_task(self._start())
        await _first(loading, self._stop.wait())
        if loading.done():
            return loading.result()
        loading.cancel()
        await _first(asyncio.gather(loading, return_exceptions=True), self._force.wait())
        return None

    async def _start(self) -> AsyncLLM:
        """The engine's process begins first; while it imports torch and loads the model, this one imports what serves
        requests, loads the tokenizer and hashes what the fingerprint names."""
        args = self._engine_args
        starting = asyncio.create_task(ProcessClient.start(args))
        try:
            await asyncio.to_thread(_import_serving)
            from enginecore.frontend.async_llm import AsyncLLM
            from enginecore.frontend.fingerprint import prepare_fingerprint
            from enginecore.metrics import Metrics

            def observer(config: EngineConfig) -> Metrics:
                return Metrics(config.served_model_name, config.num_blocks)

            overrides = self._args.override_generation_config
            self._hashing = asyncio.create_task(asyncio.to_thread(prepare_fingerprint, args))
            return await AsyncLLM.create(
                args, observer=observer, sampling_overrides=overrides, client=starting, warm=False
            )
        except BaseException:
            starting.cancel()
            done = await asyncio.gather(starting, return_exceptions=True)
            if isinstance(done[0], ProcessClient):
                await done[0].shutdown(0)
            raise

    async def _serve(self, llm: AsyncLLM) -> int:
        from enginecore.server.app import create_app
        from enginecore.server.http import QuietServer

        app = create_app(llm, self._args, max_waiting=self._engine_args.max_waiting)
        await asyncio.gather(self._hashing, return_exceptions=True)
        fingerprint = await asyncio.to_thread(lambda: app.state.fingerprint)
        _report(llm.ready)
        logger.info("fingerprint: %s", fingerprint["id"])
        server = QuietServer(self._uvicorn_config(app))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if serving.done():
            serving.result()
            return 1
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._args.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        seconds = time.monotonic() - self._started
        rpc = await self._serve_grpc(app, shown)
        logger.info("ready after %.1f s: %s at %s://%s:%d", seconds, llm.config.served_model_name, scheme, shown, port)
        llm.warm_up()
        await _first(self._stop.wait(), llm.dead.wait(), serving)
        if rpc is not None:
            await rpc.drain()
        code = await self._wind_down(app, llm)
        if rpc is not None:
            await _first(rpc.stop(), self._force.wait())
        if app.gate.tracer is not None:
            await _first(asyncio.to_thread(app.gate.tracer.close), self._force.wait(), asyncio.sleep(5))
        server.should_exit = True
        server.force_exit = self._force.is_set()
        await _first(serving, self._force.wait())
        server.force_exit = True
        return FORCED_EXIT if self._force.is_set() else code

    async def _serve_grpc(self, app: App, host: str) -> GrpcServer | None:
        """The gRPC server, where one is wanted. Its packages are only loaded then."""
        if self._args.grpc_port is None:
            return None
        from enginecore.server.grpc.server import GrpcServer

        server = await GrpcServer.start(app.gate, self._args.grpc_port)
        logger.info("gRPC at %s:%d%s", host, server.port, " (TLS)" if self._args.ssl_certfile else "")
        return server

    async def _wind_down(self, app: App, llm: AsyncLLM) -> int:
        """Wait as long as there is something worth waiting for. Returns the exit code."""
        if llm.dead.is_set():
            await _first(asyncio.sleep(DEAD_LINGER_SECONDS), self._stop.wait())
            return 1
        app.state.draining = True
        deadline = time.monotonic() + self._args.shutdown_timeout
        while app.state.in_flight and not self._force.is_set() and llm.alive:
            if time.monotonic() > deadline:
                logger.warning("%d requests did not finish in time", app.state.in_flight)
                break
            await asyncio.sleep(0.02)
        llm.fail_all(ShuttingDownError())
        return 0 if llm.alive else 1

    def _uvicorn_config(self, app: App) -> uvicorn.Config:
        import uvicorn

        from enginecore.server.http import limited_protocol

        args = self._args
        return uvicorn.Config(
            app,
            http=limited_protocol(args.max_header_bytes),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            root_path=args.root_path,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
        )


async def _first(*waiters: object) -> None:
    """Wait until one of several is done; what was started here for waiting is cancelled."""
    own = [asyncio.ensure_future(each) for each in waiters]  # type: ignore[call-overload]
    try:
        await asyncio.wait(own, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, given in zip(own, waiters, strict=True):
            if task is not given:
                task.cancel()


def _report(ready: ReadyInfo) -> None:
    """What was decided and who owns which memory."""
    logger.info("device: %s; model loaded in %.1f s", ready.device_summary, ready.load_seconds)
    for setting, value, reason in ready.config.choices:
        logger.info("  %s = %s (%s)", setting, value, reason)
    for owner, size in ready.ledger.items():
        logger.info("  memory, %s: %.1f MiB", owner, size / 2**20)
    if ready.config.pooling is not None:
        logger.info("  a model for pooling (%s), without a KV cache", ", ".join(ready.config.pooling.tasks))
        return
    if ready.config.num_blocks:
        blocks = f"{ready.config.num_blocks} blocks of {ready.config.block_size} tokens"
        logger.info("  KV cache: %s in %s", blocks, ready.config.kv_cache_dtype or "the device's own form")


def _set_up_logging() -> None:
    root = logging.getLogger("enginecore")
    if root.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
