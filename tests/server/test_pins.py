"""Operators pin prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore.frontend.tenancy import current_tenant
from enginecore.server.args import ServerArgs

from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running

KEY = {"Authorization": "Bearer k"}
ARGS = ServerArgs(api_keys=("k",))
TOLD = {"id": "pin-1", "tokens": 32, "blocks": 2, "cached_blocks": 0, "seconds_left": 60.0}


async def test_a_prefix_as_ids_text_or_messages() -> None:
    async with running(parrot, args=ARGS) as server:
        server.engine.answers["pin"] = TOLD
        ids = list(range(5, 45))
        bodies: list[dict[str, Any]] = [
            {"prompt": ids, "ttl": 60, "cache_salt": "s"}, {"prompt": "abc" * 20},
            {"messages": [{"role": "system", "content": "You are helpful. " * 2}]},
        ]  # fmt: skip
        for body in bodies:
            answer = await server.http.post("/v1/cache/pin", json=body, headers=KEY)
            assert (answer.status_code, answer.json()) == (200, {"object": "cache.pin", **TOLD}), answer.text
        asked = [arguments for method, *arguments in server.engine.calls if method == "pin"]
        assert asked[0] == [ids, 60.0, "s"] and asked[1][1:] == [3600.0, None] and len(asked[2][0]) >= 16


async def test_ending_and_listing() -> None:
    async with running(parrot, args=ARGS) as server:
        server.engine.answers |= {"unpin": True, "list_pins": [TOLD]}
        assert (await server.http.get("/v1/cache/pins", headers=KEY)).json()["data"] == [TOLD]
        answer = await server.http.post("/v1/cache/unpin", json={"id": "pin-1"}, headers=KEY)
        assert answer.json() == {"object": "cache.unpin", "id": "pin-1"}
        server.engine.answers["unpin"] = False
        answer = await server.http.post("/v1/cache/unpin", json={"id": "pin-1"}, headers=KEY)
        assert check_error(answer.status_code, answer.text, 404)["code"] == "pin_not_found"
        server.engine.answers["pin"] = None
        answer = await server.http.post("/v1/cache/pin", json={"prompt": [1] * 20}, headers=KEY)
        assert check_error(answer.status_code, answer.text, 409)["code"] == "too_many_pins"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"), ({"prompt": "a", "messages": []}, "prompt"), ({"prompt": [1] * 5}, "prompt"),
        ({"prompt": [10**9] * 20}, "prompt"), ({"prompt": [True] * 20}, "prompt"), ({"prompt": {}}, "prompt"),
        ({"prompt": [1] * 20, "ttl": 0}, "ttl"), ({"prompt": [1] * 20, "ttl": 1e99}, "ttl"),
        ({"prompt": [1] * 20, "ttl": "1h"}, "ttl"), ({"prompt": [1] * 20, "cache_salt": ""}, "cache_salt"),
        ({"prompt": [1] * 20, "cache_salt": "s" * 9999}, "cache_salt"), ({"prompt": [1] * 100_000}, "prompt"),
    ],
)  # fmt: skip
async def test_what_cannot_be_pinned(body: dict[str, Any], param: str) -> None:
    async with running(parrot, args=ARGS) as server:
        answer = await server.http.post("/v1/cache/pin", json=body, headers=KEY)
        assert check_error(answer.status_code, answer.text, 400)["param"] == param
        assert server.engine.calls == [] or all(method != "pin" for method, *_ in server.engine.calls)


async def test_only_operators() -> None:
    async with running() as server:
        for path in ("/v1/cache/pin", "/v1/cache/unpin"):
            answer = await server.http.post(path, json={"prompt": [1] * 20})
            assert check_error(answer.status_code, answer.text, 403)["code"] == "admin_needs_key"
        assert (await server.http.get("/v1/cache/pins")).status_code == 403


@pytest.mark.parametrize(("keys", "tenants"), [(("k",), [None, None]), (("one:k", "two:l"), ["one", "two"])])
async def test_work_goes_on_the_account_of_the_keys_name_where_there_are_several(
    keys: tuple[str, ...], tenants: list[str | None]
) -> None:
    async with running(parrot, args=ServerArgs(api_keys=keys)) as server:
        for key in (keys[0], keys[-1]):
            header = {"Authorization": f"Bearer {key.split(':')[-1]}"}
            body = {"prompt": "abc", "max_tokens": 2}
            assert (await server.http.post("/v1/completions", json=body, headers=header)).status_code == 200
        assert [request.tenant for request in server.engine.requests] == tenants
    current_tenant.set(None)
