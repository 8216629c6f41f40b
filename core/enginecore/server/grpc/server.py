"""The gRPC server: beside the HTTP server, in its event loop, over the same engine, keys, limits and log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from enginecore.errors import EngineCoreError
from enginecore.server.args import ServerArgs
from enginecore.server.gate import Gate
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc import enginecore_pb2_grpc
from enginecore.server.grpc.calls import Guard
from enginecore.server.grpc.service import Inference

logger = logging.getLogger("enginecore.server")

SERVICE: str = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Made and started by `start`. `port` is where it listens."""

    def __init__(self, gate: Gate) -> None:
        args = gate.state.args
        options = [
            ("grpc.max_receive_message_length", args.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", args.max_header_bytes),
            ("grpc.absolute_max_metadata_size", args.max_header_bytes),
            ("grpc.so_reuseport", 0),  # a port that is taken is an error
        ]
        self.port = 0
        self._args = args
        self._server = grpc.aio.server(interceptors=[Guard(gate)], options=options)
        self._health = health.aio.HealthServicer()
        add: Any = enginecore_pb2_grpc.add_InferenceServicer_to_server
        add(Inference(gate.state), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    @classmethod
    async def start(cls, gate: Gate, port: int) -> GrpcServer:
        """Listen on the host of the HTTP server. EngineCoreError when the port cannot be had."""
        server = cls(gate)
        host = server._args.host or "[::]"
        address = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
        try:
            credentials = _credentials(server._args)
            add = server._server.add_insecure_port
            server.port = server._server.add_secure_port(address, credentials) if credentials else add(address)
        except RuntimeError as error:
            told = f"cannot listen on {address} for gRPC: {error}"
            raise EngineCoreError(told, fix="choose another port with --grpc-port") from error
        await server._server.start()
        for name in ("", SERVICE):
            await server._health.set(name, _SERVING)
        return server

    async def drain(self) -> None:
        """From now on the health service says that nothing is served; calls go on."""
        for name in ("", SERVICE):
            await self._health.set(name, _NOT_SERVING)

    async def stop(self, grace: float = 1.0) -> None:
        """No new calls; those in flight have `grace` seconds."""
        await self._server.stop(grace)


def _credentials(args: ServerArgs) -> grpc.ServerCredentials | None:
    """The certificate of the HTTP server, if it has one."""
    if args.ssl_certfile is None or args.ssl_keyfile is None:
        return None
    pair = Path(args.ssl_keyfile).read_bytes(), Path(args.ssl_certfile).read_bytes()
    return grpc.ssl_server_credentials([pair])
