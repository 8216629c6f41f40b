from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from enginecore.server.args import ServerArgs

from tests.server.asgi import Exchange
from tests.server.checkers import check_completion, check_error
from tests.server.fake_engine import Running, parrot, running

PATH = "/v1/completions"
GOOD = {"prompt": "ab", "max_tokens": 2}


async def live(server: Running) -> None:
    check_completion((await server.post(PATH, **GOOD)).json())
    assert (await server.http.get("/health")).status_code == 200 and server.llm.num_sequences == 0


async def raw(server: Running, body: bytes, **headers: str) -> tuple[int, bytes]:
    response = await server.http.post(PATH, content=body, headers={"content-type": "application/json", **headers})
    return response.status_code, response.content


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b"  ", "empty"),
        (b"[]", "object"),
        (b'"x"', "object"),
        (b"null", "object"),
        (b"{", "JSON"),
        (b'{"prompt": "a"} x', "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "JSON"),
        (b'{"temperature": Infinity}', "JSON"),
        (b'{"temperature": -Infinity}', "JSON"),
        (b'{"temperature": 1e999}', "range"),
        (b'{"logit_bias": {"1": 1e999}}', "range"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"n": ' + b"9" * 5000 + b"}", "range"),
    ],
)
async def test_bodies_that_are_no_json_objects(body: bytes, word: str) -> None:
    async with running(parrot) as server:
        error = check_error(*await raw(server, body), 400)
        assert word in error["message"], error


@pytest.mark.parametrize("depth", [129, 1000, 10_000, 100_000])
async def test_deep_json(depth: int) -> None:
    async with running(parrot) as server:
        for value in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth):
            for body in (value, b'{"prompt": "a", "metadata": ' + value + b"}"):
                error = check_error(*await raw(server, body), 400)
                assert error["code"] == "nesting_too_deep"
        arguments = (b"[" * depth + b"]" * depth).decode()
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
        answer = await server.post("/v1/chat/completions", messages=messages)
        error = check_error(answer.status_code, answer.content, 400, "messages[1].tool_calls[0].function.arguments")
        await live(server)


async def test_content_types() -> None:
    async with running(parrot) as server:
        body = json.dumps(GOOD).encode()
        for kind, status in (
            ("application/json; charset=utf-8", 200),
            ("application/problem+json", 200),
            ("text/plain", 415),
        ):
            response = await server.http.post(PATH, content=body, headers={"content-type": kind})
            assert response.status_code == status
        check_error(response.status_code, response.content, 415)


async def test_unknown_paths_methods_and_models() -> None:
    async with running(parrot) as server:
        for path in ("/", "/nope", "/v1/completions/", "//health"):
            response = await server.http.get(path)
            check_error(response.status_code, response.content, 404)
        for method, path in (
            ("GET", PATH),
            ("DELETE", "/v1/models"),
            ("PUT", "/health"),
            ("OPTIONS", PATH),
            ("POST", "/metrics"),
        ):
            response = await server.http.request(method, path)
            check_error(response.status_code, response.content, 405)
            assert response.headers["allow"]
        for path, body in (
            (PATH, {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": []}),
            ("/tokenize", {"prompt": "a"}),
        ):
            response = await server.post(path, model="other", **body)
            error = check_error(response.status_code, response.content, 404, "model")
            assert error["code"] == "model_not_found"
        assert (await server.post(PATH, model="toy", **GOOD)).status_code == 200


async def test_body_limit_with_and_without_length() -> None:
    async with running(parrot, args=ServerArgs(max_body_bytes=1000)) as server:
        big = json.dumps({"prompt": "x" * 5000}).encode()
        length = [(b"content-length", str(len(big)).encode())]
        for headers, pieces in (
            (length, [big]),
            ([], [big]),
            ([], [big[i : i + 100] for i in range(0, len(big), 100)]),
        ):
            exchange = Exchange(server.app, PATH, headers=headers, pieces=pieces)
            status, body = await exchange.run()
            assert check_error(status, body, 413)["code"] == "body_too_large"
            assert not exchange.sent[-1]["more_body"] and exchange.headers[b"x-request-id"]
            assert not exchange._pieces, "the rest is read, so that the client sees the answer"
        await live(server)


async def test_header_limits() -> None:
    async with running(parrot) as server:
        for headers in ([(b"x-long", b"a" * 70_000)], [(b"x-%d" % i, b"1") for i in range(200)]):
            exchange = Exchange(server.app, PATH, GOOD, headers=headers)
            check_error(*await exchange.run(), 431)
        await live(server)


async def test_request_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enginecore.server")
    async with running(parrot) as server:
        for path, body, status in (
            (PATH, GOOD, 200),
            (PATH, {"prompt": ""}, 400),
            ("/nope", {}, 404),
            (PATH, {**GOOD, "stream": True}, 200),
        ):
            response = await server.http.post(path, json=body, headers={"x-request-id": "my-id-1"})
            assert response.status_code == status and response.headers["x-request-id"] == "my-id-1"
            assert "my-id-1" in caplog.records[-1].getMessage()
        assert '"id":"cmpl-my-id-1"' in response.text
        for bad in (b"a" * 129, b"a" * 1000, b"a b", b"a\x01", b"\xc3\xa9", b""):
            exchange = Exchange(server.app, PATH, GOOD, headers=[(b"x-request-id", bad)])
            await exchange.run()
            assert exchange.headers[b"x-request-id"] != bad and len(exchange.headers[b"x-request-id"]) == 32


async def test_same_request_id_twice_at_once() -> None:
    async with running(parrot) as server:
        server.engine.pause = True
        headers = [(b"x-request-id", b"same")]
        first, second = (
            Exchange(server.app, PATH, {"prompt": text, "max_tokens": 3, "n": 2}, headers=headers).start()
            for text in ("ab", "xy")
        )
        while server.engine.num_live < 4:
            await asyncio.sleep(0.001)
        first.hang_up()
        server.engine.pause = False
        assert second.task is not None
        await second.task
        assert [c["text"] for c in json.loads(second.body)["choices"]] == ["xyx", "yxy"]
        assert len({request.request_id for request in server.engine.requests}) == 4


async def test_api_keys() -> None:
    async with running(parrot, args=ServerArgs(api_keys=("key-one", "key-two"))) as server:
        for path in ("/health", "/version", "/ping", "/metrics"):
            assert (await server.http.get(path)).status_code == 200
        wrong: tuple[dict[str, str], ...] = (
            {}, {"authorization": "Bearer nope"}, {"authorization": "key-one"}, {"authorization": "Bearer "},
            {"authorization": "Basic key-one"}, {"x-api-key": "nope"},
        )  # fmt: skip
        for headers in wrong:
            for method, path in (
                ("POST", PATH),
                ("GET", "/v1/models"),
                ("GET", "/nope"),
                ("GET", "/health/"),
                ("OPTIONS", PATH),
            ):
                response = await server.http.request(method, path, headers=headers)
                error = check_error(response.status_code, response.content, 401)
                assert error["type"] == "authentication_error"
        for headers in (
            {"authorization": "Bearer key-two"},
            {"authorization": "bearer key-one"},
            {"x-api-key": "key-one"},
        ):
            assert (await server.http.post(PATH, json=GOOD, headers=headers)).status_code == 200


async def test_cors() -> None:
    async with running(parrot, args=ServerArgs(cors_origins=("http://a.example",), api_keys=("k",))) as server:
        asked = {
            "origin": "http://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        response = await server.http.options(PATH, headers=asked)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "http://a.example"
        response = await server.http.post(PATH, json=GOOD, headers={"origin": "http://a.example"})
        assert response.status_code == 401 and response.headers["access-control-allow-origin"] == "http://a.example"
        response = await server.http.options(PATH, headers={**asked, "origin": "http://b.example"})
        assert response.status_code == 400
    async with running(parrot) as server:
        response = await server.http.get("/health", headers={"origin": "http://a.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_unknown_fields(caplog: pytest.LogCaptureFixture) -> None:
    async with running(parrot) as server:
        response = await server.post(PATH, **GOOD, max_token=5, foo=1, bar=None)
        assert response.status_code == 200
        warning = next(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert "'max_token'" in warning and "'foo'" in warning and response.headers["x-request-id"] in warning
        assert "bar" not in warning, "null asks for nothing"
    async with running(parrot, args=ServerArgs(strict_fields=True)) as server:
        response = await server.post(PATH, **GOOD, foo=1)
        check_error(response.status_code, response.content, 400, "foo")


async def test_root_path() -> None:
    async with running(parrot, args=ServerArgs(api_keys=("k",))) as server:
        exchange = Exchange(server.app, "/api/health", method="GET")
        exchange.scope["root_path"] = "/api"
        assert (await exchange.run())[0] == 200


async def test_an_unexpected_exception_is_a_plain_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(parrot) as server:

        def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("secret details")

        monkeypatch.setattr(server.llm.input, "process", broken)
        response = await server.post(PATH, **GOOD)
        error = check_error(response.status_code, response.content, 500)
        assert "secret" not in error["message"] and server.llm.num_sequences == 0
