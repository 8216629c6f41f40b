"""A gRPC server over the scripted engine, and the official client to it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceStub
from enginecore.server.grpc.server import GrpcServer

from tests.server.fake_engine import Running, Script, parrot, running


@dataclass
class Wire:
    """Both servers of one process. `stub` calls the second."""

    http: Running
    rpc: GrpcServer
    channel: grpc.aio.Channel
    stub: Any


@contextlib.asynccontextmanager
async def wired(
    script: Script = parrot,
    *,
    credentials: Any = None,
    server: contextlib.AbstractAsyncContextManager[Running] | None = None,
    **options: Any,
) -> AsyncIterator[Wire]:
    """Around a server of your own, or one that is made from the script and the options."""
    async with server or running(script, **options) as http:
        rpc = await GrpcServer.start(http.app.gate, 0)
        target = f"127.0.0.1:{rpc.port}"
        channel = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
        try:
            async with channel:
                yield Wire(http, rpc, channel, InferenceStub(channel))
        finally:
            await rpc.stop(0)


def halt_after_a_step(wire: Wire) -> None:
    """The engine makes one step and then waits, so that a call that has its first token is sure to be running."""
    engine = wire.http.engine
    step = engine._step

    def once() -> Any:
        engine.pause = True
        return step()

    engine._step = once  # type: ignore[method-assign]
