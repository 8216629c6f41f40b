"""Adapters over HTTP: chosen by the model's name, loaded and unloaded by operators."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from enginecore.adapters import AdapterInfo, LoadTicket
from enginecore.server.args import ServerArgs

from tests.server.checkers import check_error
from tests.server.fake_engine import FakeEngine, Running, running

ARGS = ServerArgs(api_keys=("k",), admin_keys=("boss",))
OPERATOR, CLIENT = {"Authorization": "Bearer boss"}, {"Authorization": "Bearer k"}
SETTINGS: dict[str, Any] = {"enable_lora": True, "lora_root": "/srv/adapters", "max_loras": 2}
SQL = AdapterInfo(
    name="sql", generation=7, path="/srv/adapters/sql", sha256="ab" * 32, rank=8, num_modules=4, num_bytes=9, created=5
)


class Loading(FakeEngine):
    """Takes a while for every load. `outcome` is what becomes of it."""

    outcome = LoadTicket(info=SQL)
    waits = 2

    async def call(self, method: str, *arguments: Any) -> Any:
        await super().call(method, *arguments)
        if method != "adapter_load":
            return 3
        self.waits -= 1
        return msgspec.to_builtins(LoadTicket() if self.waits >= 0 else self.outcome)


async def load(server: Running, headers: dict[str, str] = OPERATOR, **fields: Any) -> Any:
    body = {"lora_name": "sql", "lora_path": "sql"} | fields
    return await server.http.post("/v1/load_lora_adapter", json=body, headers=headers)


async def ask(server: Running, path: str = "/v1/completions", **fields: Any) -> Any:
    return await server.http.post(path, json={"max_tokens": 2} | fields, headers=CLIENT)


async def test_a_request_names_an_adapter_as_its_model() -> None:
    async with running(kind=Loading, args=ARGS, **SETTINGS) as server:
        before = await ask(server, model="sql", prompt="ab")
        assert check_error(before.status_code, before.text, 404)["code"] == "model_not_found"
        told = (await load(server)).json()
        assert (told["lora_name"], told["rank"], told["parent"], told["sha256"]) == ("sql", 8, "toy", SQL.sha256)
        assert server.engine.calls == [("start_loading_adapter", "sql", "sql", False), *[("adapter_load", 3)] * 3]

        messages = [{"role": "user", "content": "hi"}]
        answers = [
            await ask(server, model="sql", prompt="ab"),
            await ask(server, "/v1/chat/completions", model="sql", messages=messages),
            await ask(server, "/v1/messages", model="sql", messages=messages),
            await server.http.post(
                "/v1/responses", json={"model": "sql", "input": "hi", "max_output_tokens": 2}, headers=CLIENT
            ),
        ]
        assert [request.adapter for request in server.engine.requests] == [("sql", 7)] * 4
        for answer in answers:
            assert answer.json()["model"] == "sql", answer.text
            assert answer.headers["x-system-fingerprint"] == told["fingerprint"]
        streamed = await ask(server, "/v1/chat/completions", model="sql", messages=messages, stream=True)
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert {(chunk["model"], chunk["system_fingerprint"]) for chunk in chunks} == {("sql", told["fingerprint"])}

        base = await ask(server, prompt="ab")
        assert base.json()["model"] == "toy" and server.engine.requests[-1].adapter is None
        assert base.json()["system_fingerprint"] != told["fingerprint"]
        assert (await ask(server, "/tokenize", model="sql", prompt="ab")).status_code == 200
        many = await ask(server, model="sql", prompt=["ab", "cd"], n=2)
        assert len(many.json()["choices"]) == 4
        assert [request.adapter for request in server.engine.requests[-4:]] == [("sql", 7)] * 4


async def test_what_is_told_of_adapters() -> None:
    async with running(kind=Loading, args=ARGS, **SETTINGS) as server:
        told = (await load(server)).json()
        listed = (await server.http.get("/v1/models", headers=CLIENT)).json()
        assert [(each["id"], each["parent"]) for each in listed["data"]] == [("toy", None), ("sql", "toy")]
        assert (listed["first_id"], listed["last_id"]) == ("toy", "sql")
        one = (await server.http.get("/v1/models/sql", headers=CLIENT)).json()
        assert one == listed["data"][1] and "/srv" not in json.dumps(one)
        found = (await server.http.get(f"/v1/fingerprint/{told['fingerprint']}", headers=CLIENT)).json()
        assert found["adapter"] == {"name": "sql", "sha256": SQL.sha256, "rank": 8}
        base = (await server.http.get("/v1/fingerprint", headers=CLIENT)).json()
        assert {**found, "id": base["id"]} == {**base, "adapter": found["adapter"]}


async def test_unloading() -> None:
    async with running(kind=Loading, args=ARGS, **SETTINGS) as server:
        await load(server)
        body = {"lora_name": "sql", "lora_int_id": 1}
        done = await server.http.post("/v1/unload_lora_adapter", json=body, headers=OPERATOR)
        assert done.json() == {"object": "lora_adapter.unloaded", "lora_name": "sql", "sequences_in_flight": 3}
        assert (await ask(server, model="sql", prompt="ab")).status_code == 404
        again = await server.http.post("/v1/unload_lora_adapter", json=body, headers=OPERATOR)
        assert check_error(again.status_code, again.text, 404)["code"] == "adapter_not_found"
        assert [call[0] for call in server.engine.calls].count("unload_adapter") == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_name": "../x"}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": None}, "lora_name"),
        ({"lora_path": 7}, "lora_path"),
        ({"lora_path": None}, "lora_path"),
        ({"load_inplace": "yes"}, "load_inplace"),
    ],
)
async def test_bodies_that_are_refused(fields: dict[str, Any], param: str) -> None:
    async with running(kind=Loading, args=ARGS, **SETTINGS) as server:
        answer = await load(server, **fields)
        assert param in check_error(answer.status_code, answer.text, 400)["message"]
        assert server.engine.calls == []


async def test_an_adapter_that_is_refused() -> None:
    async with running(kind=Loading, args=ARGS, **SETTINGS) as server:
        server.engine.outcome = LoadTicket(problem="the adapter cannot be served: DoRA")  # type: ignore[attr-defined]
        answer = await load(server)
        error = check_error(answer.status_code, answer.text, 400)
        assert (error["code"], error["param"]) == ("adapter_refused", "lora_path") and "DoRA" in error["message"]
        assert (await ask(server, model="sql", prompt="ab")).status_code == 404
        server.engine.outcome = LoadTicket(info=SQL)  # type: ignore[attr-defined]
        assert (await load(server)).status_code == 200
        twice = await load(server)
        assert "loaded already" in check_error(twice.status_code, twice.text, 400)["message"]
        assert (await load(server, load_inplace=True)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "headers", "code"),
    [
        (SETTINGS, CLIENT, "admin_needs_key"),
        (SETTINGS | {"lora_root": None}, OPERATOR, "no_lora_root"),
        (SETTINGS | {"enable_lora": False}, OPERATOR, "adapters_off"),
    ],
)
async def test_who_may(settings: dict[str, Any], headers: dict[str, str], code: str) -> None:
    async with running(kind=Loading, args=ARGS, **settings) as server:
        answer = await load(server, headers)
        assert check_error(answer.status_code, answer.text, 403)["code"] == code
        assert (await load(server, {})).status_code == 401
        assert server.engine.calls == []
