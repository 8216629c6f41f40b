"""F35: one usage chunk, last, when it was asked for, with the plain answer's figures. (`both` checks that much.)"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.field.answers import both, text, user
from tests.field.support import CHAT, COMPLETIONS, refused, whole_stream
from tests.serving import ServerProcess

ROUTES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "Once upon"}, CHAT: {"messages": [user("Once upon")]}}
BODY: dict[str, Any] = {"temperature": 1, "seed": 2, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize("path", ROUTES)
def test_equal_to_the_plain_answer(sim_server: ServerProcess, path: str) -> None:
    whole = text(both(sim_server, path, **ROUTES[path], **BODY))
    for n, stop in itertools.product((1, 3), (None, whole[-2:])):
        answer = both(sim_server, path, n, **ROUTES[path], **BODY, n=n, stop=stop)
        least = 1 if stop else 6
        assert n * least <= answer["usage"]["completion_tokens"] <= n * 6


@pytest.mark.parametrize("path", ROUTES)
def test_only_when_asked_for(sim_server: ServerProcess, path: str) -> None:
    body = {**ROUTES[path], **BODY}
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        events = whole_stream(sim_server, path, {**body, "stream_options": options})
        assert not any("usage" in event for event in events) and all(event["choices"] for event in events)
    events = whole_stream(sim_server, path, {**body, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    every = {"include_usage": True, "continuous_usage_stats": True}
    events = whole_stream(sim_server, path, {**body, "stream_options": every})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6
    for options in ({}, {"include_usage": True}):
        refused(sim_server.post(path, {**body, "stream_options": options}), param="stream_options")
    refused(sim_server.post(path, {**body, "stream": True, "stream_options": {"include_usage": 1}}))
    refused(sim_server.post(path, {**body, "stream": True, "stream_options": []}))
