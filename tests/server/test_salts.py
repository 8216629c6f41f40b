"""Cache salts on every route that generates: they reach the engine as they are, and bad ones are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.checkers import strict_json
from tests.server.fake_engine import parrot, running

HI = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/messages": {"model": "toy", "messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_salt_reaches_the_engine(path: str) -> None:
    async with running(parrot, served_model_name="toy") as server:
        for salt in ("s", "a" * 1024, "é\x00", None):
            answer = await server.http.post(path, json={**ROUTES[path], "cache_salt": salt})
            assert answer.status_code == 200, answer.text
        assert [request.cache_salt for request in server.engine.requests] == ["s", "a" * 1024, "é\x00", None]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("salt", ["", 5, True, ["a"], {"a": "b"}, "x" * 1025])
async def test_bad_salts_are_refused(path: str, salt: Any) -> None:
    async with running(parrot, served_model_name="toy") as server:
        answer = await server.http.post(path, json={**ROUTES[path], "cache_salt": salt})
        assert answer.status_code == 400 and "cache_salt" in str(strict_json(answer.content))
        assert server.engine.requests == []
