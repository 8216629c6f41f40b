"""F62: unknown fields are named in the log (or refused in strict mode); known ones that do nothing here are refused."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore.server.args import ServerArgs
from enginecore.server.protocol import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, refused, wait_until
from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running
from tests.serving import ServerProcess

ROUTES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": [user("x")], "max_tokens": 1},
}
SDK = {"user": "me", "metadata": {"a": "b"}}


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_fields_are_logged(sim_server: ServerProcess, path: str) -> None:
    name = f"f62{path.replace('/', '-')}"
    body = {**ROUTES[path], **SDK, "max_token": 5, "foo": 1, "bar\nbaz": None, "new\nline": 2}
    answer = sim_server.post(path, body, headers={"X-Request-Id": name})
    assert answer.status_code == 200, answer.text

    def warnings() -> list[str]:
        return [line for line in sim_server.log.read_text().splitlines() if name in line and "unknown fields" in line]

    wait_until(lambda: bool(warnings()), "a warning")
    (line,) = warnings()
    assert "WARNING" in line and "'max_token'" in line and "'foo'" in line and r"'new\nline'" in line
    assert "user" not in line and "bar" not in line, "known, or null"


@pytest.mark.parametrize("path", ROUTES)
async def test_strict_mode(path: str) -> None:
    async with running(parrot, args=ServerArgs(strict_fields=True)) as server:
        for name in ("max_token", "foo"):
            answer = await server.post(path, **ROUTES[path], **{name: 1})
            error = check_error(answer.status_code, answer.content, 400, name)
            assert error["code"] == "unknown_parameter"
        assert (await server.post(path, **ROUTES[path], **SDK)).status_code == 200


def test_known_but_unsupported(sim_server: ServerProcess) -> None:
    fields: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"suffix": "x", "kv_transfer_params": {}, "prompt_embeds": "AAAA", "guided_regex": "a+"},
        CHAT: {"audio": {"voice": "x"}, "modalities": ["text", "audio"], "functions": [{"name": "f"}], "store": True,
               "web_search_options": {}, "prediction": {"type": "content", "content": "x"}, "guided_choice": ["a"]},
    }  # fmt: skip
    listed = {COMPLETIONS: UNSUPPORTED_COMPLETION, CHAT: UNSUPPORTED_CHAT}
    for path, values in fields.items():
        assert values.keys() <= listed[path].keys()
        for name, value in values.items():
            error = refused(sim_server.post(path, {**ROUTES[path], name: value}), param=name)
            assert error["code"] == "unsupported_parameter"
