"""Where the gRPC server listens: TLS, ports that are taken."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import pytest
from enginecore.errors import EngineCoreError
from enginecore.server.args import ServerArgs
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.grpc.enginecore_pb2_grpc import InferenceStub
from enginecore.server.grpc.server import GrpcServer
from enginecore.server.run import serve

from tests.server.fake_engine import EngineArgs, running, saying
from tests.server.grpc.wire import wired

CERTIFICATE = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
NAME = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
ASK = pb.GenerateRequest(text="x")


async def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [*CERTIFICATE, *NAME, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
    args = ServerArgs(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    async with wired(saying("hello"), args=args, credentials=credentials) as wire:
        assert (await wire.stub.Generate(ASK)).choices[0].text == "hello"
        async with grpc.aio.insecure_channel(f"127.0.0.1:{wire.rpc.port}") as plain:
            with pytest.raises(grpc.aio.AioRpcError):
                await InferenceStub(plain).Generate(ASK, timeout=5)


async def test_a_port_that_is_taken() -> None:
    async with wired() as wire:
        with pytest.raises(EngineCoreError, match="--grpc-port"):
            serve(EngineArgs(model="no-such-model"), ServerArgs(port=0, grpc_port=wire.rpc.port))
        with pytest.raises(EngineCoreError, match="--grpc-port"):
            await GrpcServer.start(wire.http.app.gate, wire.rpc.port)


async def test_an_address_of_the_sixth_version() -> None:
    async with running(args=ServerArgs(host="::1")) as server:
        rpc = await GrpcServer.start(server.app.gate, 0)
        async with grpc.aio.insecure_channel(f"[::1]:{rpc.port}") as channel:
            assert (await InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="x"))).token_ids
        await rpc.stop(0)
