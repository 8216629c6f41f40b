"""The engine process: `python -m enginecore.engine.process IN OUT`, its settings as one JSON line on standard input.

Standard input stays open as a lifeline: when it ends, the frontend is gone and so is this process, whatever it was
doing.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import shutil
import signal
import sys
import threading
import traceback
from concurrent.futures import Future
from typing import Any

import zmq

from enginecore.config import EngineArgs, ReadyInfo
from enginecore.engine import channel
from enginecore.errors import EngineCoreError
from enginecore.request import StepOutputs

logger = logging.getLogger("enginecore.engine")

#: Methods that the frontend may call on the engine by name.
CALLABLE = frozenset(
    {"use_tokenizer", "reset_prefix_cache", "stats", "memory", "explain", "pin", "unpin", "list_pins"}
    | {"sleep", "wake_up", "is_sleeping"}
    | {"start_loading_adapter", "adapter_load", "unload_adapter", "list_adapters"}
)

#: After this long without anything to do, the engine prepares for what may come.
IDLE_MS = 1500
#: While KV blocks are moved between memories and nothing runs, what has arrived is taken in this often.
MOVING_MS = 10


def _watch_lifeline(folder: str) -> None:
    """End when the frontend does. It has had no chance to remove the sockets' folder if it was killed."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class EngineProcess:
    """Reads commands, steps, writes outputs; one thread, so that nothing needs a lock."""

    def __init__(self, engine: Any, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._quit = False

    def run(self) -> None:
        """Until told to quit. Whatever a step raises ends the process: its state can no longer be trusted."""
        while not self._quit:
            self._drain(block=not self._engine.has_work())
            if self._quit:
                break
            if self._engine.has_work():
                self._send(channel.OUTPUTS, self._engine.step())

    def _drain(self, *, block: bool) -> None:
        """Take in every command that is there; with `block`, wait for the first."""
        while block and self._engine.tidy() and not self._inbox.poll(MOVING_MS):
            pass
        if block and not self._inbox.poll(IDLE_MS):
            self._engine.when_idle()
            self._inbox.poll()
        while not self._quit:
            try:
                kind, body = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(kind, body)

    def _handle(self, kind: bytes, body: bytes) -> None:
        if kind == channel.ADD:
            request = channel.decode_request(body)
            self._engine.add(request)
            self._engine.scheduler.journal.sent(request.request_id, request.arrival_time)
        elif kind == channel.ABORT:
            reason, ids = channel.decode_abort(body)
            if self._engine.abort(ids, reason) and not self._engine.has_work():
                self._send(channel.OUTPUTS, StepOutputs([], self._engine.stats()))
        elif kind == channel.CALL:
            self._call(*channel.decode_call(body))
        elif kind == channel.QUIT:
            self._quit = True

    def _call(self, call_id: int, method: str, arguments: list[Any]) -> None:
        """A call with a wrong name or wrong arguments is its caller's error and nobody else's."""
        if method not in CALLABLE:
            self._send(channel.VALUE, (call_id, None, f"the engine has no method {method!r} to call"))
            return
        function = getattr(self._engine, method)
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            self._send(channel.VALUE, (call_id, None, f"{method}: {error}"))
            return
        try:
            value, problem = function(*arguments), None
        except EngineCoreError as error:  # refused, and nothing has changed
            value, problem = None, str(error)
        self._send(channel.VALUE, (call_id, value, problem))

    def _send(self, kind: bytes, body: Any) -> None:
        self._outbox.send_multipart([kind, channel.encode(body)])


def _failure(error: BaseException) -> channel.Failure:
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if isinstance(error, EngineCoreError):
        failure = channel.Failure(type(error).__name__, error.message, error.fix, error.exit_code, trace)
        failure.param = getattr(error, "param", None)
        failure.reasons = getattr(error, "reasons", ())
        return failure
    return channel.Failure(type(error).__name__, f"{type(error).__name__}: {error}", None, 1, trace)


def _start(args: EngineArgs) -> tuple[Any, ReadyInfo]:
    """The engine. Its device is chosen, which is to ask plugins in processes of their own, while this one imports
    torch: either takes about as long."""
    from enginecore.device.select import SelectedDevice, select_device

    chosen: Future[SelectedDevice] = Future()

    def choose() -> None:
        try:
            chosen.set_result(select_device(args.device))
        except BaseException as error:
            chosen.set_exception(error)

    threading.Thread(target=choose, daemon=True).start()
    gc.disable()  # imports make hardly any garbage, and looking for it is a tenth of their time
    try:
        from enginecore.engine.start import start_engine
    except Exception:
        chosen.result()  # what is wrong with the device says more than what came of it
        raise
    finally:
        gc.enable()
    return start_engine(args, chosen.result)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides when to stop
    args = channel.decode_args(sys.stdin.buffer.readline())
    folder = os.path.dirname(sys.argv[1].removeprefix("ipc://"))
    threading.Thread(target=_watch_lifeline, args=(folder,), daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((inbox, sys.argv[1]), (outbox, sys.argv[2])):
        socket.set_hwm(0)
        socket.connect(address)
    code = 0
    engine = None
    try:
        engine, ready = _start(args)
        gc.freeze()  # else each full collection walks everything that loading made: a pause of some 0.2 s
        outbox.send_multipart([channel.READY, channel.encode(ready)])
        EngineProcess(engine, inbox, outbox).run()
    except Exception as error:
        failure = _failure(error)
        if not isinstance(error, EngineCoreError):
            logger.error("the engine process ends: %s", failure.traceback)
        outbox.send_multipart([channel.FAILURE, channel.encode(failure)])
        code = failure.exit_code
    finally:
        if engine is not None:
            engine.shutdown()
        inbox.close(0)
        outbox.close(2000)
        context.term()
    return code


if __name__ == "__main__":
    sys.stdout.flush()
    sys.exit(main())
