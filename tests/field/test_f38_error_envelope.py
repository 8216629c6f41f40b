"""F38: every error is the same envelope, with the right status and the field named, and the server goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, post_raw, refused, unharmed
from tests.serving import ServerProcess

#: Fields of both generating routes.
SHARED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": -1}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": -0.1}, "min_p"), ({"n": 0}, "n"),
    ({"n": 129}, "n"), ({"n": "2"}, "n"), ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"), ({"stop": [""]}, "stop"), ({"max_tokens": -1}, "max_tokens"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 3}, "priority"), ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"guided_json": {}}, "guided_json"), ({"chat_template": "x"}, "chat_template"),
)  # fmt: skip
TABLE: dict[str, tuple[dict[str, Any], tuple[tuple[dict[str, Any], str], ...]]] = {
    COMPLETIONS: (
        {"prompt": "x"},
        (
            *SHARED, ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [49152]}, "prompt"),
            ({"prompt": ["a", 5]}, "prompt[1]"), ({"logprobs": 21}, "logprobs"), ({"suffix": "x"}, "suffix"),
            ({"best_of": 0}, "best_of"),
        ),
    ),
    CHAT: (
        {"messages": [user("x")]},
        (
            *SHARED, ({"messages": None}, "messages"), ({"messages": []}, "messages"), ({"messages": "x"}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages[0].content"), ({"messages": [5]}, "messages[0]"),
            ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"tools": [{}]}, "tools[0]"), ({"tool_choice": 5}, "tool_choice"),
            ({"response_format": {"type": "xml"}}, "response_format"), ({"audio": {}}, "audio"),
        ),
    ),
    TOKENIZE: (
        {},
        (
            ({}, "prompt"), ({"prompt": "a", "messages": [user("x")]}, "prompt"), ({"prompt": 5}, "prompt"),
            ({"messages": []}, "messages"), ({"messages": [user(5)]}, "messages[0].content"),
            ({"prompt": "a", "chat_template": "x"}, "chat_template"),
        ),
    ),
    DETOKENIZE: (
        {},
        (
            ({}, "tokens"), ({"tokens": "x"}, "tokens"), ({"tokens": [-1]}, "tokens"), ({"tokens": [49152]}, "tokens"),
            ({"tokens": [1.5]}, "tokens[0]"), ({"tokens": [2**70]}, "tokens"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", TABLE)
def test_invalid_values_name_the_field(sim_server: ServerProcess, path: str) -> None:
    content, cases = TABLE[path]
    with unharmed(sim_server):
        for fields, param in cases:
            body = {**content, **fields}
            error = refused(sim_server.post(path, body))
            assert error["type"] == "invalid_request_error" and str(error["param"]).startswith(param), (fields, error)
            if path in (COMPLETIONS, CHAT) and "stream" not in fields and "stream_options" not in fields:
                refused(sim_server.post(path, {**body, "stream": True}), param=error["param"])


@pytest.mark.parametrize("path", TABLE)
def test_bodies_that_are_no_object(sim_server: ServerProcess, path: str) -> None:
    with unharmed(sim_server):
        for body in (b"", b"{", b"[]", b'"x"', b"5", b"null", b"{'prompt': 'x'}", b'{"prompt": "x",}', b"\xff\xfe\x00"):
            assert refused(post_raw(sim_server, path, body))["code"] == "invalid_json"
        answer = sim_server.http.post(path, content=b"prompt=x", headers={"content-type": "text/plain"})
        refused(answer, 415)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE])
def test_unknown_model(sim_server: ServerProcess, path: str) -> None:
    contents: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "x"},
        TOKENIZE: {"prompt": "x"},
        DETOKENIZE: {"tokens": [5]},
    }
    body = {**contents.get(path, {"messages": [user("x")]}), "model": "gpt-17"}
    assert refused(sim_server.post(path, body), 404, "model")["code"] == "model_not_found"


def test_unknown_paths_and_wrong_methods(sim_server: ServerProcess) -> None:
    for path in ("/", "/v1", "/v1/moderations", "/v1/completions/", "/../etc/passwd", "/v1/models/gpt-17"):
        refused(sim_server.http.get(path), 404)
    for method, path, allowed in (
        ("GET", COMPLETIONS, "POST"), ("PUT", CHAT, "POST"), ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/smollm2", "GET, HEAD"), ("POST", "/metrics", "GET, HEAD"),
    ):  # fmt: skip
        answer = sim_server.http.request(method, path)
        refused(answer, 405)
        assert answer.headers["allow"] == allowed
