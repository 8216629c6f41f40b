"""F54: the Responses API: the sequence of events, status, the store, continued conversations, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.support import live
from tests.server.checkers import check_error
from tests.server.response_checker import check_response, check_response_stream, same_response
from tests.serving import ServerProcess

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Count to ten.", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}


def both(server: ServerProcess, **change: Any) -> dict[str, Any]:
    """Plain and streamed, which must be equal but for ids and the cache's share."""
    change = {"skip_reading_prefix_cache": True, **change}
    plain = server.post(PATH, {**BODY, **change})
    assert plain.status_code == 200, plain.text
    streamed = check_response_stream(server.post(PATH, {**BODY, **change, "stream": True}).text)
    answer = check_response(plain.json())
    same_response(streamed, answer)
    return answer


def test_events_and_status(sim_server: ServerProcess) -> None:
    answer = both(sim_server)
    assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
    logprobs = both(sim_server, top_logprobs=3, include=["message.output_text.logprobs"])["output"][0]["content"][0]
    assert len(logprobs["logprobs"]) == 12
    ended = both(sim_server, logit_bias={"2": 100}, ignore_eos=False)
    assert ended["status"] == "completed" and ended["output"] == []


def test_the_store(sim_server: ServerProcess) -> None:
    kept = sim_server.post(PATH, BODY).json()["id"]
    assert sim_server.http.get(f"{PATH}/{kept}").json()["id"] == kept
    hidden = sim_server.post(PATH, {**BODY, "store": False}).json()["id"]
    for method, path in (("GET", hidden), ("DELETE", "resp_no"), ("POST", "resp_no/cancel"), ("GET", "no/input_items")):
        reply = sim_server.http.request(method, f"{PATH}/{path}")
        check_error(reply.status_code, reply.text, 404)
    assert sim_server.http.delete(f"{PATH}/{kept}").json()["deleted"] is True
    assert sim_server.http.get(f"{PATH}/{kept}").status_code == 404
    assert sim_server.post(PATH, {**BODY, "previous_response_id": kept}).status_code == 404


def test_a_follow_up_reads_the_whole_conversation(sim_server: ServerProcess) -> None:
    first = sim_server.post(PATH, {**BODY, "instructions": "Be brief."}).json()
    follow = {**BODY, "input": "Go on.", "previous_response_id": first["id"]}
    continued = both(sim_server, **follow)
    items = [{"role": "user", "content": BODY["input"]}, *first["output"], {"role": "user", "content": "Go on."}]
    by_hand = both(sim_server, input=items)
    assert continued["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"], "instructions are not inherited"
    assert continued["output"][0]["content"] == by_hand["output"][0]["content"]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input": ""}, 200, None),
        ({"input": []}, 400, "input"),
        ({"input": "word " * 20_000}, 400, "input"),
        ({"max_output_tokens": 10**6}, 400, "max_output_tokens"),
        ({"max_output_tokens": 5.5}, 400, "max_output_tokens"),
        ({"model": "other"}, 404, "model"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ({"previous_response_id": "resp_unknown"}, 404, "previous_response_id"),
        ({"temperature": -1}, 400, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, 400, None),
    ],
)
def test_refusals(sim_server: ServerProcess, change: dict[str, Any], status: int, param: str | None) -> None:
    reply = sim_server.post(PATH, {**BODY, **change})
    if status == 200:
        assert reply.status_code == 200, "the template says more than the message"
    else:
        check_error(reply.status_code, reply.text, status, param)
    live(sim_server)
