"""F50: continue_final_message continues exactly the text that was given."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, rendered, text, user
from tests.field.support import CHAT, TOKENIZE, refused
from tests.serving import ServerProcess

QUESTION = user("What is the capital of France?")
BODY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.mark.parametrize("prefill", ["The answer is", "  padded \n", "Paris"])
def test_equal_to_a_completion_of_the_same_prompt(server: ServerProcess, prefill: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": prefill}]
    opened = server.post("/detokenize", {"tokens": rendered(server, [QUESTION])}).json()["prompt"]
    raw = both(server, prompt=opened + prefill, add_special_tokens=False, **BODY)
    chat = both(server, CHAT, messages=messages, continue_final_message=True, **BODY)
    assert text(chat) == text(raw) and chat["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]
    echoed = both(server, CHAT, messages=messages, continue_final_message=True, echo=True, **BODY)
    assert text(echoed) == prefill + text(raw)


def test_without_a_generation_prompt(server: ServerProcess) -> None:
    opened, closed = rendered(server, [QUESTION]), rendered(server, [QUESTION], add_generation_prompt=False)
    assert opened[: len(closed)] == closed and len(opened) > len(closed)
    answer = both(server, CHAT, messages=[QUESTION], add_generation_prompt=False, **BODY)
    assert answer["usage"]["prompt_tokens"] == len(closed)


def test_contradictions(sim_server: ServerProcess) -> None:
    final = {"role": "assistant", "content": "The"}
    for path in (CHAT, TOKENIZE):
        for body in (
            {"messages": [QUESTION, final], "add_generation_prompt": True},
            {"messages": [QUESTION]},
            {"messages": [QUESTION, final, QUESTION]},
        ):
            refused(sim_server.post(path, {**body, "continue_final_message": True}), param="continue_final_message")
