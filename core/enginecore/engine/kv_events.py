"""KV events over ZeroMQ, for routers that send a request where its prefix is cached.

Each batch is one message of three frames on a PUB socket: topic, sequence number (8 bytes, big endian), and msgpack of
`EventBatch`: [ts, [event, ...], data_parallel_rank]. Who missed some asks the replay socket (ROUTER) with one frame,
the first number wanted, and gets a message (number, batch) for each that is still kept, then the number -1 and nothing.
A thread of its own sends, so that no step waits for a subscriber; a slow one loses batches, as its numbers show.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import deque

import msgspec
import zmq

from enginecore.config import EngineArgs
from enginecore.errors import ParameterError
from enginecore.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

logger = logging.getLogger("enginecore.engine")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
#: Batches kept for replay, and batches that may wait for the thread.
KEEP, MAX_QUEUED = 10_000, 100_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """`ts` is in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class EventPublisher:
    """Binds `endpoint` when it has a wildcard (tcp://*:5557) or is local (ipc://, inproc://), and connects to any
    other, as vLLM's does: then it is the address of a router that listens for many. Binds `replay`, where given.

    Raises ParameterError when an address cannot be bound, or is none.
    """

    def __init__(self, endpoint: str, topic: str, replay: str | None = None, keep: int = KEEP) -> None:
        self._context = zmq.Context()
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=keep)
        self._queue: queue.Queue[list[KVCacheEvent]] = queue.Queue(MAX_QUEUED)
        self._quit = threading.Event()
        try:
            bind = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
            self._out = self._open(zmq.PUB, endpoint, "kv_events_endpoint", bind=bind)
            self._replay = None
            if replay is not None:
                self._replay = self._open(zmq.ROUTER, replay, "kv_events_replay", bind=True)
        except ParameterError:
            self._context.destroy(0)
            raise
        self._thread = threading.Thread(target=self._run, name="enginecore-kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, param: str, *, bind: bool) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        # Who asks for a replay may be slower than it is told; what cannot be sent to a subscriber is its loss.
        opened.set_hwm(0 if kind == zmq.ROUTER else MAX_QUEUED)
        try:
            _check(endpoint, resolve=not bind)
            if bind:
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except (zmq.ZMQError, OSError) as error:
            how = "bound" if bind else "connected to"
            raise ParameterError(f"{param}: {endpoint!r} cannot be {how}: {error}", param=param) from error
        return opened

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Hand a batch to the thread; never waits. Batches that do not fit are lost and logged."""
        try:
            self._queue.put_nowait(events)
        except queue.Full:
            logger.warning("%d KV events are lost: they come faster than they can be sent", len(events))

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._quit.set()
        self._thread.join(2)
        self._context.destroy(0)

    def _run(self) -> None:
        encode, number = msgspec.msgpack.Encoder().encode, 0
        while not (self._quit.is_set() and self._queue.empty()):
            with contextlib.suppress(queue.Empty):
                events = self._queue.get(timeout=0.05)
                payload = encode(EventBatch(time.time(), events, 0))  # type: ignore[arg-type]
                self._kept.append((number, payload))
                self._out.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
                number += 1
            self._serve_replay()

    def _serve_replay(self) -> None:
        if self._replay is None or not self._replay.poll(0):
            return
        client, *_, start = self._replay.recv_multipart()
        if len(start) != 8:
            return
        first = int.from_bytes(start, "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", END_OF_REPLAY, b""])


def _check(endpoint: str, *, resolve: bool) -> None:
    """What ZeroMQ takes without a word: a port that there is not, a host that nobody knows. Raises OSError."""
    kind, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if kind == "tcp" and port.isdigit():
        if int(port) > 65535:
            raise OSError(f"there is no port {port}")
        if resolve:
            socket.getaddrinfo(host.strip("[]"), int(port))


def open_publisher(args: EngineArgs, model: str) -> EventPublisher | None:
    """The publisher that the arguments ask for, None for none. Readers take the topic apart at its "@"."""
    if args.kv_events_endpoint is None:
        return None
    topic = args.kv_events_topic or f"kv@{socket.gethostname()}@{args.served_model_name or model}"
    return EventPublisher(args.kv_events_endpoint, topic, args.kv_events_replay)
