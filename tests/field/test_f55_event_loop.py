"""F55: a text of megabytes is tokenised off the event loop; one that cannot fit is refused without being tokenised."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from enginecore.server import chat, completions

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, TOKENIZE, InFlight, refused, token_prompt, unharmed
from tests.server.fake_engine import parrot, running
from tests.serving import ServerProcess

#: Words, so that the tokenizer has work.
LONG = "the quick brown fox jumps over the lazy dog; " * 110_000
#: What one answer of /health may take, with room for a machine that is busy with other things.
PATIENCE = 5.0


def test_health_and_streams_go_on_meanwhile(sim_server: ServerProcess) -> None:
    assert len(LONG) > 4.9e6
    body: dict[str, Any] = {"prompt": token_prompt(55, 10), "max_tokens": 1000, "ignore_eos": True, "stream": True}
    done: list[float] = []
    chunks: list[float] = []

    def tokenize() -> int:
        answer = sim_server.post(TOKENIZE, {"prompt": LONG}, timeout=120)
        done.append(time.monotonic())
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["count"]
        return count

    def stream() -> None:
        while not done:
            with sim_server.http.stream("POST", COMPLETIONS, json=body) as answer:
                for line in answer.iter_lines():
                    if line:
                        chunks.append(time.monotonic())
                    if done:
                        break

    with unharmed(sim_server):
        polls = []
        with InFlight([tokenize, stream]) as flight:
            while not done:
                assert sim_server.http.get("/health", timeout=PATIENCE).status_code == 200
                polls.append(time.monotonic())
                time.sleep(0.01)
    assert flight.results[0] > 1_000_000
    assert sum(poll < done[0] for poll in polls) >= 10, "/health was answered while the text was tokenised"
    assert sum(chunk < done[0] for chunk in chunks) >= 50, "the stream went on"


def test_early_refusal(sim_server: ServerProcess) -> None:
    for path, content in ((COMPLETIONS, {"prompt": LONG}), (CHAT, {"messages": [user(LONG)]})):
        error = refused(sim_server.post(path, content, timeout=PATIENCE))
        assert error["code"] == "context_length_exceeded"
        assert "characters" in error["message"], "told from its length; nobody counted its tokens"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_large_bodies_are_checked_in_a_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list with a million entries costs a second to go through; a small body is not worth a thread."""
    module, name = (completions, "completion_params") if path == COMPLETIONS else (chat, "chat_params")
    original = getattr(module, name)
    threads = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return original(*arguments)

    monkeypatch.setattr(module, name, noted)
    async with running(parrot) as server:
        body: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": [user("x")]}
        for ids in ([5], [5] * 50_000):
            answer = await server.post(path, **body, stop_token_ids=ids, max_tokens=1)
            assert answer.status_code == 200, answer.text
    assert threads == [True, False]


def test_long_lists_of_strings_are_refused_before_they_are_tokenised(sim_server: ServerProcess) -> None:
    for name in ("stop", "bad_words"):
        error = refused(sim_server.post(COMPLETIONS, {"prompt": "x", name: ["word" * 5000]}), param=name)
        assert "16384 characters" in error["message"]
    error = refused(sim_server.post(COMPLETIONS, {"prompt": ["x"] * 5000}), param="prompt")
    assert "4096 prompts" in error["message"]
