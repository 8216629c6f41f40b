"""Routes for operators."""

from __future__ import annotations

from enginecore.server.args import ServerArgs

from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running

KEY = {"Authorization": "Bearer k"}


async def test_resetting_the_prefix_cache_needs_a_key() -> None:
    async with running(parrot, args=ServerArgs(api_keys=("k",))) as server:
        assert (await server.http.post("/reset_prefix_cache")).status_code == 401
        assert server.engine.calls == []
        answer = await server.http.post("/reset_prefix_cache", headers=KEY)
        assert (answer.status_code, answer.json()) == (200, {"object": "prefix_cache.reset", "blocks": 0})
        assert server.engine.calls == [("reset_prefix_cache",)]
        assert (await server.http.get("/reset_prefix_cache", headers=KEY)).status_code == 405


async def test_a_server_without_keys_has_no_operators() -> None:
    async with running() as server:
        answer = await server.http.post("/reset_prefix_cache")
        error = check_error(answer.status_code, answer.text, 403)
        assert error["code"] == "admin_needs_key" and "--api-key" in error["message"]
        assert server.engine.calls == []
