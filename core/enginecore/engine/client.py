"""The frontend's end of the engine: in another process (`ProcessClient`, asyncio) or in this one (`InprocClient`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from enginecore import errors
from enginecore.config import EngineArgs, ReadyInfo
from enginecore.engine import channel
from enginecore.errors import EngineCoreError, EngineDeadError
from enginecore.request import EngineRequest, StepOutputs

if TYPE_CHECKING:
    from enginecore.engine.engine import Engine

#: The name of a socket may have 107 bytes (103 on some systems), "/out" included.
MAX_FOLDER_BYTES = 99
#: What a process sent before it ended may take this long to come out of the socket.
LAST_WORDS_S = 0.25


def _socket_folder() -> str:
    """A new folder for the two sockets; where the usual place has too long a name for a socket, one in /tmp."""
    folder = tempfile.mkdtemp(prefix="enginecore-")
    if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="enginecore-", dir="/tmp")
    return folder


def _close(outbox: Any, inbox: Any, folder: str) -> None:
    outbox.close(0)
    inbox.close(0)
    shutil.rmtree(folder, ignore_errors=True)


def _as_error(failure: channel.Failure) -> EngineCoreError:
    """The engine's error again, as the class it was raised as."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, EngineCoreError):
        error = kind(failure.message) if kind is errors.QueueFullError else kind(failure.message, fix=failure.fix)
    else:
        error = EngineCoreError(failure.message, fix=failure.fix)
    error.exit_code = failure.exit_code
    if isinstance(error, errors.ParameterError):
        error.param = failure.param
    if isinstance(error, errors.UnsupportedError):
        error.reasons = failure.reasons
    return error


class ProcessClient:
    """An engine in a child process. Its death is noticed at once: `recv` raises EngineDeadError, `alive` turns False.

    Made by `start`, used from one event loop.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: str, inbox: Any, outbox: Any) -> None:
        self._process = process
        self._folder = folder
        self._inbox = inbox
        self._outbox = outbox
        self._death = asyncio.create_task(process.wait())
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._failure: EngineCoreError | None = None
        self._receive: asyncio.Future[list[bytes]] | None = None
        self.ready: ReadyInfo

    @classmethod
    async def start(cls, args: EngineArgs) -> ProcessClient:
        """Start the process and wait until the model is loaded. Raises what building the engine raised."""
        folder = _socket_folder()
        context = zmq.asyncio.Context.instance()
        outbox, inbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        try:
            for socket, name in ((outbox, "in"), (inbox, "out")):
                socket.set_hwm(0)
                socket.bind(f"ipc://{folder}/{name}")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "enginecore.engine.process",
                f"ipc://{folder}/in",
                f"ipc://{folder}/out",
                stdin=asyncio.subprocess.PIPE,
            )
        except BaseException:
            _close(outbox, inbox, folder)
            raise
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(args) + b"\n")
        client = cls(process, folder, inbox, outbox)
        try:
            kind, body = await client._next_frame()
            if kind == channel.FAILURE:
                raise _as_error(channel.decode_failure(body))
            client.ready = channel.decode_ready(body)
        except BaseException:
            await client.shutdown(timeout=0)
            raise
        return client

    @property
    def alive(self) -> bool:
        return not self._death.done() and self._failure is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _next_frame(self) -> list[bytes]:
        """The next frame, or EngineDeadError once the process is gone and its last words are read."""
        if self._receive is None:
            self._receive = asyncio.ensure_future(self._inbox.recv_multipart())
        receive = self._receive  # outlives a cancelled wait, so that no frame is lost with it
        await asyncio.wait({receive, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            await asyncio.wait({receive}, timeout=LAST_WORDS_S)
        if not receive.done():
            raise EngineDeadError(f"the engine process has ended with code {self._process.returncode}")
        self._receive = None
        frame: list[bytes] = receive.result()
        return frame

    async def recv(self) -> StepOutputs:
        """The next step's outputs. Raises EngineDeadError when the process has ended or is about to."""
        while True:
            try:
                kind, body = await self._next_frame()
            except EngineDeadError as error:
                self._die(error)
                raise
            if kind == channel.OUTPUTS:
                return channel.decode_outputs(body)
            if kind == channel.VALUE:
                self._answer(*channel.decode_value(body))
            elif kind == channel.FAILURE:
                failure = channel.decode_failure(body)
                dead = EngineDeadError(f"the engine has failed: {failure.message}")
                self._die(dead)
                raise dead

    def _answer(self, call_id: int, value: Any, problem: str | None) -> None:
        waiter = self._calls.pop(call_id, None)
        if waiter is None or waiter.done():
            return
        if problem is None:
            waiter.set_result(value)
        else:
            waiter.set_exception(EngineCoreError(problem))

    def _die(self, error: EngineCoreError) -> None:
        self._failure = error
        for waiter in self._calls.values():
            if not waiter.done():
                waiter.set_exception(error)
        self._calls.clear()

    def _send(self, kind: bytes, body: Any) -> None:
        if not self.alive:
            raise EngineDeadError("the engine process has ended")
        self._outbox.send_multipart([kind, channel.encode(body)])

    def add(self, request: EngineRequest) -> None:
        self._send(channel.ADD, request)

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        if self.alive:
            self._send(channel.ABORT, (reason, list(request_ids)))

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of the engine between two steps, before what is sent after this; nobody hears the outcome."""
        self._send(channel.CALL, (-1, method, list(arguments)))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the engine between two steps. Somebody must be in `recv` for the answer to arrive."""
        call_id = next(self._call_ids)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = waiter
        self._send(channel.CALL, (call_id, method, list(arguments)))
        return await waiter

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Ask the process to stop, then make it. Returns once it is gone."""
        if self._process.returncode is None:
            if timeout > 0 and self._failure is None:
                self._outbox.send_multipart([channel.QUIT, b""])
            done, _ = await asyncio.wait({self._death}, timeout=timeout)
            if not done:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        await self._death
        self._die(EngineDeadError("the engine was shut down"))
        if self._receive is not None:
            self._receive.cancel()
        _close(self._outbox, self._inbox, self._folder)


class InprocClient:
    """An engine in this process, for offline use: the caller drives `step`."""

    def __init__(self, args: EngineArgs) -> None:
        from enginecore.engine.start import start_engine

        self._engine: Engine
        self._engine, self.ready = start_engine(args)

    def add(self, request: EngineRequest) -> None:
        self._engine.add(request)

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        self._engine.abort(request_ids, reason)

    def step(self) -> StepOutputs:
        return self._engine.step()

    def has_work(self) -> bool:
        return self._engine.has_work()

    def tell(self, method: str, *arguments: Any) -> None:
        getattr(self._engine, method)(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._engine, method)(*arguments)

    def shutdown(self) -> None:
        self._engine.shutdown()
