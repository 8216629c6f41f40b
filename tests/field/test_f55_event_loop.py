"""F55: a text of megabytes is tokenised off the event loop; one that cannot fit is refused without being tokenised."""

from __future__ import annotations

import time
from typing import Any

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, TOKENIZE, InFlight, refused, token_prompt, unharmed
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
