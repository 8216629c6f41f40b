"""KV events as a subscriber gets them, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.engine.kv_events import END_OF_REPLAY, EventPublisher
from enginecore.errors import ParameterError
from enginecore.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from enginecore.request import EngineRequest, SamplingParams

from tests.serving import free_port


@pytest.fixture
def sockets() -> Iterator[Any]:
    context = zmq.Context()
    opened: list[Any] = []

    def connect(kind: int, endpoint: str) -> Any:
        socket = context.socket(kind)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.setsockopt(zmq.LINGER, 0)
        opened.append(socket)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        socket.connect(endpoint)
        return socket

    yield connect
    context.destroy(0)


def replayed(socket: Any, first: int) -> list[tuple[int, Any]]:
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found = []
    while True:
        _, number, payload = socket.recv_multipart()
        if number == END_OF_REPLAY:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


def test_the_wire_format(sockets: Any) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publisher = EventPublisher(endpoint.replace("127.0.0.1", "*"), "kv@pod@model", replay, keep=2)
    try:
        subscriber = sockets(zmq.SUB, endpoint)
        asking = sockets(zmq.DEALER, replay)
        while not subscriber.poll(50):  # until the subscription has arrived
            publisher.publish([AllBlocksCleared()])
        first = int.from_bytes(subscriber.recv_multipart()[1], "big")
        publisher.publish([BlockStored([5, 2**64 - 1], None, [1, 2, 3, 4], 2), BlockRemoved([7])])
        while True:
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv@pod@model" and len(number) == 8
            first += 1
            assert int.from_bytes(number, "big") == first
            ts, events, rank = msgspec.msgpack.decode(payload)
            if events != [["AllBlocksCleared"]]:
                break
        assert ts > 1.7e9 and rank == 0
        stored = ["BlockStored", [5, 2**64 - 1], None, [1, 2, 3, 4], 2, None, "GPU", None, None]
        assert events == [stored, ["BlockRemoved", [7], "GPU"]]
        assert [number for number, _ in replayed(asking, 0)] == [first - 1, first], "the last two are kept"
        assert replayed(asking, first)[0][1][1] == events
        assert replayed(asking, first + 1) == []
    finally:
        publisher.close()


def test_an_engine_publishes_what_it_caches(sockets: Any, config_only: str) -> None:
    endpoint, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    args = EngineArgs(
        model=config_only, device="sim", num_blocks=64, max_model_len=256, served_model_name="m",
        kv_events_endpoint=endpoint, kv_events_replay=replay,
    )  # fmt: skip
    client = InprocClient(args)
    try:
        client.add(EngineRequest("a", list(range(40)), SamplingParams(), 4))
        while client.has_work():
            client.step()
        client.call("reset_prefix_cache")
        asking = sockets(zmq.DEALER, replay)
        batches: list[tuple[int, Any]] = []
        while len(batches) < 2:
            batches = replayed(asking, 0)
        (stored,), (cleared,) = batches[0][1][1], batches[1][1][1]
        assert stored[0] == "BlockStored" and stored[3] == list(range(32)) and stored[2] is None
        assert cleared == ["AllBlocksCleared"]
    finally:
        client.shutdown()


def test_an_address_without_a_wildcard_is_a_routers(sockets: Any) -> None:
    """It binds, and pods connect to it."""
    context = zmq.Context()
    router = context.socket(zmq.SUB)
    router.setsockopt(zmq.RCVTIMEO, 10_000)
    router.setsockopt(zmq.SUBSCRIBE, b"kv@")
    endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    publisher = EventPublisher(endpoint, "kv@pod@model")
    try:
        while not router.poll(50):
            publisher.publish([AllBlocksCleared()])
        assert router.recv_multipart()[0] == b"kv@pod@model"
    finally:
        publisher.close()
        context.destroy(0)


def test_a_long_replay_arrives_whole(sockets: Any) -> None:
    """Longer than what sockets hold back by themselves."""
    replay = f"tcp://127.0.0.1:{free_port()}"
    publisher = EventPublisher(f"tcp://*:{free_port()}", "kv@pod@model", replay)
    try:
        for i in range(3000):
            publisher.publish([BlockRemoved([i])])
        asking = sockets(zmq.DEALER, replay)
        found: list[tuple[int, Any]] = []
        while len(found) < 3000:
            found = replayed(asking, 0)
        assert [number for number, _ in found] == list(range(3000))
    finally:
        publisher.close()


@pytest.mark.parametrize("address", ["tcp://no-such-host.invalid:5557", "tcp://127.0.0.1", "nonsense", "tcp://*:99999"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ParameterError, match="kv_events_endpoint"):
        EventPublisher(address, "kv@pod@model")


@pytest.mark.parametrize("field", ["kv_events_endpoint", "kv_events_replay"])
def test_an_address_that_cannot_be_bound(config_only: str, field: str) -> None:
    addresses = {"kv_events_endpoint": f"tcp://*:{free_port()}", field: "tcp://nowhere"}
    args = EngineArgs(model=config_only, device="sim", num_blocks=64, max_model_len=256, **addresses)
    with pytest.raises(ParameterError, match=field):
        InprocClient(args)
