"""F56: two hundred calls that tokenise at once, none of which disturbs another."""

from __future__ import annotations

import functools
from typing import Any

import httpx

from tests.field.answers import rendered, tokens_of, user
from tests.field.support import CHAT, COMPLETIONS, TOKENIZE, together, unharmed
from tests.serving import ServerProcess


def test_two_hundred_mixed_calls(sim_server: ServerProcess) -> None:
    long = " ".join(["many words of a long text"] * 20)
    whole = rendered(sim_server, [user(long)])
    counts = [len(tokens_of(sim_server, "word " * size)) for size in range(1, 51)]

    def post(path: str, **body: Any) -> httpx.Response:
        return sim_server.post(path, body)

    calls = []
    for i in range(50):
        one: dict[str, Any] = {"max_tokens": 1, "ignore_eos": True}
        truncated: dict[str, Any] = {**one, "messages": [user(long)], "truncate_prompt_tokens": i + 1}
        calls += [
            functools.partial(post, TOKENIZE, prompt="word " * (i + 1), add_special_tokens=False),
            functools.partial(post, CHAT, **truncated, return_token_ids=True),
            functools.partial(post, COMPLETIONS, **one, prompt="hi", bad_words=[f"word{i}", "Paris"]),
            functools.partial(post, "/detokenize", tokens=whole[i:]),
        ]
    with unharmed(sim_server):
        answers = together(calls)
    assert [answer.status_code for answer in answers] == [200] * 200
    assert [answer.json()["count"] for answer in answers[::4]] == counts
    for i, answer in enumerate(answers[1::4]):
        assert answer.json()["prompt_token_ids"] == whole[-(i + 1) :]
        assert answer.json()["usage"]["prompt_tokens"] == i + 1
    texts = [answer.json()["prompt"] for answer in answers[3::4]]
    assert all(text.endswith(texts[-1]) and long[-30:] in text for text in texts)
