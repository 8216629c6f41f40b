"""The account of memory and time."""

from __future__ import annotations

from enginecore.server.args import ServerArgs

from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running

BLOCKS = {"in_use": 3, "cached": 20, "free": 41, "slots_held": 48, "tokens_held": 40, "forks": 2, "forked_tokens": 30}


async def test_memory_by_owner_and_state() -> None:
    async with running() as server:
        measured = {"measured_weights": 1010, "measured_process": 7000, "measured_peak": 8000}
        server.engine.answers["memory"] = {**BLOCKS, **measured}
        server.engine.ready.ledger.update(budget=9000, weights=1000, kv_cache=64 * server.llm.config.num_blocks)
        answer = (await server.http.get("/v1/memory")).json()
        assert answer["ledger"]["weights"] == 1000
        assert answer["predicted_and_measured"] == [
            {"owner": "weights", "predicted": 1000, "measured": 1010},
            {"owner": "kv_cache", "predicted": 4096, "measured": None},
            {"owner": "process", "predicted": 5096, "measured": 7000, "peak": 8000},
        ]
        kv = answer["kv_cache"]
        assert kv["blocks"] == {"in_use": 3, "cached": 20, "free": 41} and kv["block_bytes"] == 64
        assert kv["bytes"] == {"in_use": 192, "cached": 1280, "free": 2624}
        assert kv["running"] == {"slots_held": 48, "tokens_held": 40}
        assert kv["shared_by_forks"] == {"forks": 2, "tokens": 30}


async def test_tiers_below_the_device() -> None:
    async with running() as server:
        server.engine.answers["memory"] = {**BLOCKS, "host_slots": 9, "host_blocks": 4, "swaps": 1}
        kv = (await server.http.get("/v1/memory")).json()["kv_cache"]
        assert kv["tiers"] == {"host": {"slots": 9, "blocks": 4}, "disk": None}


async def test_a_device_whose_blocks_cost_nothing() -> None:
    async with running() as server:
        server.engine.answers["memory"] = BLOCKS
        kv = (await server.http.get("/v1/memory")).json()["kv_cache"]
        assert kv["block_bytes"] is None and kv["bytes"] is None


async def test_explaining_a_request_by_either_id() -> None:
    async with running(parrot, args=ServerArgs(api_keys=("k",))) as server:
        key = {"Authorization": "Bearer k"}
        body = {"prompt": "abc", "n": 2, "max_tokens": 2}
        answer = await server.http.post("/v1/completions", json=body, headers={**key, "x-request-id": "a/b"})
        server.engine.answers["explain"] = [{"state": "ended"}, {"state": "ended"}]
        for name in ("a/b", answer.json()["id"]):
            told = await server.http.get(f"/v1/requests/{name}/explain", headers=key)
            assert told.status_code == 200 and len(told.json()["sequences"]) == 2
        asked = [arguments for method, *arguments in server.engine.calls if method == "explain"]
        assert asked == [[[request.request_id for request in server.engine.requests]]] * 2
        assert (await server.http.get("/v1/requests/a/explain")).status_code == 401
        unknown = await server.http.get("/v1/requests/other/explain", headers=key)
        assert check_error(unknown.status_code, unknown.text, 404)["code"] == "request_not_found"
        server.engine.answers["explain"] = []
        assert (await server.http.get("/v1/requests/a/b/explain", headers=key)).status_code == 404
