"""Batch files over the application, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from enginecore.errors import EngineDeadError
from enginecore.server.batch import MAX_CUSTOM_ID, BatchCounts, BatchRun, LineError, is_answer, read_line

from tests.server.fake_engine import Running, running, saying
from tests.server.fake_pooling import pooling_server

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def request(custom_id: Any = "a", url: Any = "/v1/chat/completions", body: Any = CHAT, **more: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}).encode()


async def run(server: Running, lines: list[bytes], **options: Any) -> tuple[BatchCounts, list[dict[str, Any]]]:
    async def numbered() -> AsyncIterator[tuple[int, bytes]]:
        for number, line in enumerate(lines, 1):
            yield number, line

    written: list[bytes] = []
    ticks: list[int] = []
    batch = BatchRun(
        server.app, numbered(), written.append, progress=lambda counts: ticks.append(counts.lines),
        **{"in_flight": 4, **options},
    )  # fmt: skip
    counts = await batch.run()
    assert ticks == list(range(1, len(lines) + 1)) and all(line.endswith(b"\n") for line in written)
    return counts, [json.loads(line) for line in written]


async def test_every_kind_of_route_and_of_line() -> None:
    lines = [
        request("chat"),
        request("text", "/v1/completions", {"prompt": "x", "max_tokens": 4}),
        request("responses", "/v1/responses", {"input": "x", "max_output_tokens": 4}),
        request("messages", "/v1/messages", {"model": "toy", "max_tokens": 4, "messages": CHAT["messages"]}),
        request("count", "/v1/messages/count_tokens", {"model": "toy", "messages": CHAT["messages"]}),
        b"{nonsense",
        request("bad", body={**CHAT, "temperature": "hot"}),
        request("gone", body={**CHAT, "model": "another"}),
        request("operators", "/reset_prefix_cache", {}),
        request("chat", body=CHAT),
    ]
    async with running(saying("hello"), served_model_name="toy") as server:
        counts, written = await run(server, lines)
        assert len(server.engine.requests) == 4 and server.llm.num_sequences == 0
    found = {entry["custom_id"]: entry for entry in written if entry["error"] is None}
    statuses = {name: entry["response"]["status_code"] for name, entry in found.items()}
    good = ("chat", "text", "responses", "messages", "count")
    assert statuses == {**dict.fromkeys(good, 200), "bad": 400, "gone": 404, "operators": 403}
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert found["messages"]["response"]["body"]["content"][0]["text"] == "hello"
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert all(entry["id"].startswith("batch_req_") and set(entry) == {"id", "custom_id", "response", "error"}
               for entry in written)  # fmt: skip
    assert len({entry["response"]["request_id"] for entry in found.values()}) == len(found)
    errors = {entry["error"]["line"]: entry["error"] for entry in written if entry["error"] is not None}
    assert {line: error["code"] for line, error in errors.items()} == {6: "invalid_json", 10: "duplicate_custom_id"}
    assert (counts.succeeded, counts.failed, counts.invalid) == (5, 3, 2) and counts.generated_tokens == 8


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"[]", "invalid_json"),
        (b'{"a": ' + b"[" * 500, "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (request(5), "invalid_custom_id"),
        (request(""), "invalid_custom_id"),
        (request("x" * (MAX_CUSTOM_ID + 1)), "invalid_custom_id"),
        (b'{"method": "POST"}', "invalid_custom_id"),
        (request(method="GET"), "invalid_method"),
        (request(url="/v1/nothing"), "invalid_url"),
        (request(url="/health"), "invalid_url"),
        (request(url=None), "invalid_url"),
        (request(body=[]), "invalid_body"),
        (request(body=None), "invalid_body"),
        (request(body={**CHAT, "stream": True}), "unsupported_parameter"),
        (request(url="/v1/responses", body={"input": "x", "background": True}), "unsupported_parameter"),
    ],
)
def test_lines_that_are_no_requests(line: bytes, code: str) -> None:
    with pytest.raises(LineError) as caught:
        read_line(line)
    assert caught.value.code == code


def test_a_member_of_that_name_elsewhere_is_fine() -> None:
    assert read_line(request(body={**CHAT, "metadata": {"stream": True}, "stream": False})).custom_id == "a"


async def test_no_more_in_flight_than_allowed() -> None:
    async with running(saying("hello world")) as server:
        most = 0
        submit = server.engine.add

        def add(each: Any) -> None:
            nonlocal most
            submit(each)
            most = max(most, server.engine.num_live)

        server.engine.add = add  # type: ignore[method-assign]
        counts, _ = await run(server, [request(str(number)) for number in range(20)], in_flight=3)
        assert counts.succeeded == 20 and 1 < most <= 3


async def test_what_is_done_is_left_out() -> None:
    async with running(saying("hello")) as server:
        counts, written = await run(server, [request("a"), request("b")], done=frozenset({"a"}))
        assert [entry["custom_id"] for entry in written] == ["b"] and counts.skipped == 1
        assert len(server.engine.requests) == 1


async def test_the_engines_death_ends_it_and_writes_no_failures() -> None:
    async with running(saying("hello")) as server:
        written: list[bytes] = []

        async def lines() -> AsyncIterator[tuple[int, bytes]]:
            yield 1, request("first")
            while not written:
                await asyncio.sleep(0.001)
            server.engine.die()
            for number in range(2, 9):
                yield number, request(str(number))

        with pytest.raises(EngineDeadError):
            await BatchRun(server.app, lines(), written.append, in_flight=2, progress=lambda counts: None).run()
        assert [json.loads(line)["custom_id"] for line in written] == ["first"]


def test_which_answers_stand() -> None:
    def line(status: int | None, custom_id: str | None = "a") -> bytes:
        response = None if status is None else {"status_code": status, "request_id": "r", "body": {}}
        return json.dumps({"id": "x", "custom_id": custom_id, "response": response, "error": None}).encode()

    assert [is_answer(line(status)) for status in (200, 400, 429, 500, 503, None)] == ["a", "a", *[None] * 4]
    for text in (b'{"id": "x"', request(), b"[]"):
        with pytest.raises(ValueError):
            is_answer(text)


async def test_vectors() -> None:
    async with pooling_server() as server:
        lines = [request(url="/v1/embeddings", body={"input": "hello world"}), request("b", "/v1/completions", CHAT)]
        counts, written = await run(server, lines)
    found = {entry["custom_id"]: entry["response"] for entry in written}
    assert len(found["a"]["body"]["data"][0]["embedding"]) == 8 and found["b"]["status_code"] == 400
    assert (counts.prompt_tokens, counts.generated_tokens) == (2, 0)
