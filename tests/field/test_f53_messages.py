"""F53: Anthropic's Messages API: order of events, reasons to stop, blocks, figures, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.field.support import VOCAB, live
from tests.server.message_checker import check_message, check_message_stream
from tests.serving import MODEL_NAME, ServerProcess

PATH = "/v1/messages"
ASK = [{"role": "user", "content": "Count to ten, please."}]
BODY: dict[str, Any] = {"model": MODEL_NAME, "messages": ASK, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def both(server: ServerProcess, **change: Any) -> dict[str, Any]:
    """Plain and streamed, which must be equal but for the id."""
    plain = server.post(PATH, {**BODY, **change})
    assert plain.status_code == 200, plain.text
    streamed = check_message_stream(server.post(PATH, {**BODY, **change, "stream": True}).text)
    answer = check_message(plain.json())
    assert {**answer, "id": "", "usage": 0} == {**streamed, "id": "", "usage": 0}
    assert answer["usage"]["output_tokens"] == streamed["usage"]["output_tokens"]
    return answer


def test_text_stop_and_length(sim_server: ServerProcess) -> None:
    answer = both(sim_server)
    assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 12
    text = answer["content"][0]["text"]
    stop = text[3:5]
    cut = both(sim_server, stop_sequences=["\x00never", stop])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == text.split(stop)[0]
    assert both(sim_server, stop_sequences=[text[:1]])["content"] == []
    ended = both(sim_server, logit_bias={"2": 100}, ignore_eos=False)
    assert ended["stop_reason"] == "end_turn" and ended["content"] == []


def test_counts_are_those_of_the_prompt(sim_server: ServerProcess) -> None:
    for system in (None, "Be brief.", [{"type": "text", "text": "Be brief."}]):
        fields = {"model": MODEL_NAME, "messages": ASK, **({"system": system} if system else {})}
        counted = sim_server.post(f"{PATH}/count_tokens", fields).json()["input_tokens"]
        for _ in range(2):  # with and without a cached prefix
            assert sim_server.post(PATH, {**BODY, **fields}).json()["usage"]["input_tokens"] == counted


def test_a_salt_keeps_caches_apart(sim_server: ServerProcess) -> None:
    marked = [{"type": "text", "text": "Unlike any other. " * 20, "cache_control": {"type": "ephemeral"}}]

    def read(salt: str | None) -> int:
        usage = sim_server.post(PATH, {**BODY, "system": marked, "cache_salt": salt}).json()["usage"]
        total: int = usage["cache_read_input_tokens"]
        return total

    first, again = read("a"), read("a")
    assert first == 0 < again and read("b") == 0


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"max_tokens": None}, 400),
        ({"max_tokens": "5"}, 400),
        ({"model": None}, 400),
        ({"model": "other"}, 404),
        ({"messages": None}, 400),
        ({"messages": "hi"}, 400),
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400),
        ({"system": 5}, 400),
        ({"stop_sequences": "x"}, 400),
        ({"temperature": float("1e999")}, 400),
        ({"logit_bias": {str(VOCAB): 1}}, 400),
        ({"chat_template": "{{ 1 }}"}, 400),
        ({"chat_template_kwargs": {"messages": []}}, 400),
        ({"cache_salt": ""}, 400),
    ],
)
def test_refusals_have_anthropics_shape(sim_server: ServerProcess, change: dict[str, Any], status: int) -> None:
    body = {name: value for name, value in {**BODY, **change, "stream": True}.items() if value is not None}
    reply = sim_server.http.post(PATH, content=json.dumps(body), headers={"content-type": "application/json"})
    answer = reply.json()
    assert reply.status_code == status and set(answer) == {"type", "error", "request_id"}, answer
    assert answer["type"] == "error" and set(answer["error"]) == {"type", "message"}
    assert answer["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    live(sim_server)
