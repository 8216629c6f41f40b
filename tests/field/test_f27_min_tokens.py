"""F27: min_tokens and ignore_eos hold against everything that could end a sequence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, text, tokens_of, user
from tests.field.support import CHAT, COMPLETIONS, EOS, refused
from tests.serving import ServerProcess

#: The greedy answer is eight tokens long.
QUESTION = user("What is the capital of France?")
SHORT: dict[str, Any] = {"messages": [QUESTION], "temperature": 0, "return_token_ids": True}


def only(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    assert isinstance(choice, dict)
    return choice


def test_no_end_before_the_minimum(server: ServerProcess) -> None:
    plain = only(both(server, CHAT, **SHORT, max_tokens=30))
    assert plain["finish_reason"] == "stop" and plain["token_ids"][-1] == EOS
    longer = only(both(server, CHAT, **SHORT, min_tokens=15, max_tokens=16))
    assert longer["token_ids"][: len(plain["token_ids"]) - 1] == plain["token_ids"][:-1]
    assert len(longer["token_ids"]) >= 15 and EOS not in longer["token_ids"][:15]
    forced = only(both(server, CHAT, **SHORT, min_tokens=10, max_tokens=30, logit_bias={str(EOS): 100}))
    assert len(forced["token_ids"]) == 11 and forced["finish_reason"] == "stop"
    assert forced["token_ids"].index(EOS) == 10


def test_stop_token_ids_and_stop_strings_before_the_minimum(server: ServerProcess) -> None:
    body: dict[str, Any] = {"prompt": "List: apple,", "temperature": 0}
    plain = text(server.complete(**body, max_tokens=10))
    assert plain == " apple," * 5
    (comma,) = tokens_of(server, ",")
    (apple,) = tokens_of(server, " apple")
    stopped = both(server, **body, max_tokens=10, stop_token_ids=[comma])
    assert text(stopped) == " apple" and only(stopped)["stop_reason"] == comma
    later = only(both(server, **body, max_tokens=10, min_tokens=5, stop_token_ids=[comma], return_token_ids=True))
    assert comma not in later["token_ids"][:5] and apple in later["token_ids"]
    assert text(both(server, **body, max_tokens=10, stop=",")) == " apple"
    assert text(both(server, **body, max_tokens=10, min_tokens=5, stop=",")) == " apple, apple, apple"


def test_ignore_eos(server: ServerProcess) -> None:
    past = only(both(server, CHAT, **SHORT, ignore_eos=True, max_tokens=12))
    assert len(past["token_ids"]) == 12 and past["finish_reason"] == "length" and EOS in past["token_ids"]
    forced = only(both(server, CHAT, **SHORT, ignore_eos=True, max_tokens=4, logit_bias={str(EOS): 100}))
    assert forced["token_ids"] == [EOS] * 4 and forced["finish_reason"] == "length"
    assert forced["message"]["content"] == ""
    named = only(both(server, CHAT, **SHORT, ignore_eos=True, max_tokens=12, stop_token_ids=[EOS]))
    assert named["finish_reason"] == "stop" and named["stop_reason"] == EOS, "asked for by its number"


@pytest.mark.parametrize("limits", [{"min_tokens": 5, "max_tokens": 4}, {"min_tokens": -1}, {"min_tokens": 1.5}])
def test_invalid(sim_server: ServerProcess, limits: dict[str, Any]) -> None:
    refused(sim_server.post(COMPLETIONS, {"prompt": "x", **limits}), param="min_tokens")
    refused(sim_server.post(CHAT, {"messages": [user("x")], **limits}), param="min_tokens")
