"""Keys, their limits and the audit log."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from enginecore.errors import ParameterError
from enginecore.server.args import ServerArgs
from enginecore.server.errors import ApiError
from enginecore.server.keys import Bucket, Keyring

from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running
from tests.server.test_responses import PATH as RESPONSES

PATH = "/v1/completions"
GOOD = {"prompt": "abcd", "max_tokens": 3}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


class Now:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_bucket_fills_up_evenly_and_can_be_overdrawn() -> None:
    now = Now()
    bucket = Bucket(60, now)
    for _ in range(60):
        assert not bucket.wait(1)
        bucket.spend(1)
    assert bucket.wait(1) == pytest.approx(1)
    now.seconds = 1
    assert not bucket.wait(1)
    bucket.spend(31)
    assert bucket.wait(1) == pytest.approx(31)
    now.seconds = 1000
    assert not bucket.wait(60) and bucket.wait(61), "never more than a minute's"


def test_who_a_key_belongs_to(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nteam:k3 requests-per-minute=5 concurrency=2  # slow\n\nteam:k4 concurrency=2 "
                    "requests-per-minute=5\nroot:k5 admin\n")  # fmt: skip
    args = ServerArgs(
        api_keys=("k1", "app:k2"), admin_keys=("ops:k6",), api_key_file=str(file), key_tokens_per_minute=9
    )
    ring = Keyring(args)
    found = {name: ring.find_key(name.encode()) for name in ("k1", "k2", "k3", "k4", "k5", "k6")}
    assert [client.name for client in found.values()] == ["key1", "app", "team", "team", "root", "ops"]
    assert found["k3"] is found["k4"] and found["k3"].limits.requests_per_minute == 5
    assert found["k3"].limits.tokens_per_minute == 9 and [c.admin for c in found.values()] == [False] * 4 + [True] * 2
    for wrong in (b"", b"k", b"k1 ", b"app:k2", "k\xe9".encode()):
        with pytest.raises(ApiError):
            ring.find_key(wrong)


@pytest.mark.parametrize(
    "line", ["nameless", "a:b speed=3", "a:b requests-per-minute=x", "a:b c d", "team:x\nteam:y admin"]
)
def test_a_bad_key_file_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "keys").write_text(line)
    with pytest.raises(ParameterError):
        Keyring(ServerArgs(api_key_file=str(tmp_path / "keys")))
    with pytest.raises(ParameterError, match="cannot be read"):
        Keyring(ServerArgs(api_key_file=str(tmp_path / "none")))


async def test_requests_and_tokens_a_minute() -> None:
    args = ServerArgs(api_keys=("a:ka", "b:kb"), key_requests_per_minute=2)
    async with running(parrot, args=args) as server:
        for _ in range(2):
            assert (await server.http.post(PATH, json=GOOD, headers=key("ka"))).status_code == 200
        for path, body in ((PATH, GOOD), ("/tokenize", {"prompt": "x"})):
            refused = await server.http.post(path, json=body, headers=key("ka"))
            error = check_error(refused.status_code, refused.content, 429)
            assert error["code"] == "rate_limit_exceeded" and 1 <= int(refused.headers["retry-after"]) <= 31
        assert (await server.http.get("/v1/models", headers=key("ka"))).status_code == 200, "looking is free"
        assert (await server.http.post(PATH, json=GOOD, headers=key("kb"))).status_code == 200, "others are not hurt"
    async with running(parrot, args=ServerArgs(key_tokens_per_minute=20)) as server:
        streamed: dict[str, Any] = {**GOOD, "n": 3, "stream": True}
        assert (
            await server.post(PATH, **streamed)
        ).status_code == 200  # up to four tokens of a prompt, nine of answers
        messages = [{"role": "user", "content": "hi"}]
        assert (await server.post(PATH, **GOOD)).status_code == 200
        large = await server.post("/v1/messages", model="toy", max_tokens=20, messages=messages)
        assert large.status_code == 200, "the bucket may be overdrawn"
        refused = await server.post(RESPONSES, input="hi")
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) > 10, "the debt is paid off first"


async def test_concurrency() -> None:
    async with running(parrot, args=ServerArgs(api_keys=("a:ka", "b:kb"), key_concurrency=1)) as server:
        server.engine.pause = True
        first = asyncio.create_task(server.http.post(PATH, json=GOOD, headers=key("ka")))
        while not server.engine.num_live:
            await asyncio.sleep(0.001)
        refused = await server.http.post(PATH, json=GOOD, headers=key("ka"))
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        server.engine.pause = False
        assert (await first).status_code == 200
        server.engine.pause = True
        started = await server.http.post(RESPONSES, json={"input": "hi", "background": True}, headers=key("ka"))
        refused = await server.http.post(PATH, json=GOOD, headers=key("ka"))
        assert refused.status_code == 429, "a response in the background is in flight, too"
        other = await server.http.get(f"{RESPONSES}/{started.json()['id']}", headers=key("kb"))
        assert other.status_code == 404, "a response is its maker's"
        server.engine.pause = False
        while server.app.state.in_flight:
            await asyncio.sleep(0.001)
        assert (await server.http.post(PATH, json=GOOD, headers=key("ka"))).status_code == 200


async def test_every_route_is_closed_without_a_key() -> None:
    """By default, and also where somebody forgets: routes are asked as the application lists them."""
    async with running(parrot, args=ServerArgs(api_keys=("a:ka",), admin_keys=("ops:ko",))) as server:
        routes = [(method, path) for method, path, _ in server.app.routes]
        assert len(routes) > 20
        for method, path in [*routes, ("GET", "/nope"), ("POST", "/v1")]:
            response = await server.http.request(method, path.replace(":path", ""))
            is_open = path in ("/health", "/ping", "/version", "/metrics")
            assert (response.status_code == 200) if is_open else (response.status_code == 401), path
        for method, path in (
            ("POST", "/reset_prefix_cache"), ("GET", "/server_info"), ("POST", "/sleep"), ("POST", "/wake_up"),
            ("GET", "/is_sleeping"),
        ):  # fmt: skip
            response = await server.http.request(method, path, headers=key("ka"))
            assert check_error(response.status_code, response.content, 403)["code"] == "admin_needs_key"
            response = await server.http.request(method, path, headers=key("ko"))
            assert response.status_code == 200, path
        info = response.text + (await server.http.get("/server_info", headers=key("ko"))).text
        assert '"clients":["a","ops"]' in info and '"ka"' not in info and "ops:ko" not in info
        load = (await server.http.get("/load", headers=key("ka"))).json()
        assert load == {"server_load": 0, "num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0}


async def test_sleep_and_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(parrot, args=ServerArgs(api_keys=("k",))) as server:
        server.engine.pause = True
        waiting = asyncio.create_task(server.http.post(PATH, json=GOOD, headers=key("k")))
        while not server.engine.num_live:
            await asyncio.sleep(0.001)
        response = await server.http.post("/sleep?level=1", headers=key("k"))
        assert check_error(response.status_code, response.content, 409)["code"] == "busy"
        server.engine.pause = False
        await waiting
        assert server.engine.calls == []
        assert (await server.http.post("/sleep?level=2", headers=key("k"))).json()["is_sleeping"] is True
        refused = await server.http.post(PATH, json=GOOD, headers=key("k"))
        assert check_error(refused.status_code, refused.content, 503)["code"] == "asleep"
        assert (await server.http.post("/wake_up", headers=key("k"))).json()["is_sleeping"] is False
        assert (await server.http.post(PATH, json=GOOD, headers=key("k"))).status_code == 200
        assert server.engine.calls == [("sleep", 2), ("wake_up",)]

        async def call(method: str, *arguments: Any) -> Any:
            raise RuntimeError(f"the engine has no method {method!r} to call")

        monkeypatch.setattr(server.engine, "call", call)
        response = await server.http.post("/sleep", headers=key("k"))
        assert check_error(response.status_code, response.content, 501)["code"] == "not_supported"


async def test_the_audit_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "enginecore.server")
    log = tmp_path / "audit"
    args = ServerArgs(api_keys=("app:ka",), audit_log=str(log))
    secret = "secret words"
    async with running(parrot, args=args) as server:
        told = {"prompt": secret, "max_tokens": 3}
        await server.http.post(PATH, json=told, headers={**key("ka"), "x-request-id": "r1"})
        await server.http.post(PATH, json={**told, "stream": True}, headers=key("ka"))
        await server.http.post("/v1/messages", json={"system": secret}, headers=key("ka"))
        await server.http.post(PATH, json=told, headers=key("wrong"))
        await server.http.get("/health")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["client"], line["status"]) for line in lines] == [
        ("app", 200),
        ("app", 200),
        ("app", 400),
        (None, 401),
    ]
    assert lines[0]["request_id"] == "r1" and lines[0]["path"] == PATH and lines[0]["time"]
    assert [line["generated_tokens"] for line in lines] == [3, 3, 0, 0] and lines[0]["prompt_tokens"] > 0
    assert "secret" not in log.read_text() and "secret" not in caplog.text and "wrong" not in caplog.text
    async with running(parrot, args=ServerArgs(audit_log=str(log), audit_bodies=True)) as server:
        await server.post(PATH, prompt=secret, max_tokens=1)
    assert secret in json.loads(log.read_text().splitlines()[-1])["body"]
