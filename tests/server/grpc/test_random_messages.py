"""Whatever a message holds, it is answered or refused in so many words: no INTERNAL, no UNKNOWN, and nothing stays."""

from __future__ import annotations

import random
from typing import Any

import grpc
from enginecore.server.grpc import enginecore_pb2 as pb
from google.protobuf.descriptor import FieldDescriptor as Field

from tests.server.fake_pooling import pooling_server
from tests.server.grpc.wire import Wire, wired

SAID = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
TEXTS = (
    *("", "a", "hello world", "x" * 3000, "\0", "\U0001f600\u0301"),
    *("{", '{"type": "object"}', "[a-z]+", "user", "toy", "[" * 300),
)
WHOLE = (0, 1, 2, 5, 16, 300, 2**31 - 1)
REAL = (0.0, 0.5, 1.0, -1.0, 1e308, float("inf"), float("nan"), 1e-300)


def fill(message: Any, chance: random.Random, share: float) -> Any:
    """Random values in a share of the fields, of every depth."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() > share:
            continue
        repeated = field.is_repeated
        if repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(chance.randrange(3)):
                getattr(message, field.name)[chance.choice(WHOLE)] = chance.choice(REAL)
        elif field.type == Field.TYPE_MESSAGE:
            targets = [getattr(message, field.name)]
            if repeated:
                targets = [targets[0].add() for _ in range(chance.randrange(4))]
            for target in targets:
                if not repeated:
                    target.SetInParent()
                fill(target, chance, share)
        elif repeated:
            getattr(message, field.name).extend(value(field, chance) for _ in range(chance.choice((0, 1, 3, 70))))
        else:
            setattr(message, field.name, value(field, chance))
    return message


def value(field: Field, chance: random.Random) -> Any:
    if field.type == Field.TYPE_STRING:
        return chance.choice(TEXTS)
    if field.type == Field.TYPE_BOOL:
        return chance.random() < 0.5
    if field.type == Field.TYPE_DOUBLE:
        return chance.choice(REAL)
    signed = field.type in (Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_SINT32)
    return chance.choice(WHOLE) * (chance.choice((1, -1)) if signed else 1)


async def send(wire: Wire, method: str, request: Any) -> str:
    call = getattr(wire.stub, method)(request, timeout=60)
    try:
        if method == "GenerateStream":
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        assert error.details(), request
        return error.code().name
    return "OK"


async def test_random_messages() -> None:
    chance = random.Random(1)
    found: dict[str, int] = {}
    async with wired(tokens_per_step=64) as wire:
        for number in range(120):
            for method in ("Generate", "GenerateStream", "Tokenize", "Detokenize"):
                kind = getattr(pb, "GenerateRequest" if method == "GenerateStream" else f"{method}Request")
                request = fill(kind(), chance, chance.choice((0.1, 0.3, 0.8)))
                if hasattr(request, "model") and chance.random() < 0.9:
                    request.model = ""
                code = await send(wire, method, request)
                assert code in SAID, (number, method, code, request)
                found[code] = found.get(code, 0) + 1
        assert not wire.http.llm.num_sequences and not wire.http.app.state.in_flight
    assert found["OK"] > 10 and found["INVALID_ARGUMENT"] > 50, found
    async with wired(server=pooling_server()) as wire:
        for _ in range(60):
            request = fill(pb.EmbedRequest(), chance, 0.4)
            assert await send(wire, "Embed", request) in SAID, request
