"""F26: logit_bias bans, forces and leaves the reported log-probabilities alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.field.answers import both, texts, tokens_of, user
from tests.field.support import CHAT, COMPLETIONS, refused, unharmed
from tests.serving import ServerProcess

STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 5, "logprobs": 3}


def test_ban_and_force(server: ServerProcess) -> None:
    plain = both(server, **STORY, return_token_ids=True)["choices"][0]
    first = plain["token_ids"][0]
    banned = both(server, **STORY, logit_bias={str(first): -100}, return_token_ids=True)["choices"][0]
    assert first not in banned["token_ids"]
    logprobs = banned["logprobs"]
    assert logprobs["top_logprobs"][0] == pytest.approx(
        {**plain["logprobs"]["top_logprobs"][0], logprobs["tokens"][0]: logprobs["token_logprobs"][0]}, abs=1e-3
    ), "log-probabilities are the model's own, whatever the bias"
    (rare,) = tokens_of(server, " Zan")[:1]
    forced = server.complete(**STORY, logit_bias={str(rare): 100}, return_token_ids=True)["choices"][0]
    assert forced["token_ids"] == [rare] * 5
    assert forced["logprobs"]["token_logprobs"][0] < -5, "what the model thinks of it"


def test_with_n_temperature_and_chat(server: ServerProcess) -> None:
    (word,) = tokens_of(server, " yes")
    forced: dict[str, Any] = {"temperature": 1, "max_tokens": 3, "logit_bias": {str(word): 100}}
    answer = both(server, COMPLETIONS, 2, prompt="Is it?", n=2, **forced)
    assert texts(answer) == [" yes" * 3] * 2
    answer = both(server, CHAT, messages=[user("Is it?")], **forced)
    assert texts(answer) == [" yes" * 3]


@pytest.mark.parametrize(
    "bias",
    [*({key: 1} for key in ("abc", "1.5", "-1", "", "49152")), *({"1": b} for b in (100.5, -101, "x", True)), [1], "1"],
)
def test_invalid(sim_server: ServerProcess, bias: Any) -> None:
    with unharmed(sim_server):
        for path, content in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [user("x")]})):
            error = refused(sim_server.post(path, {**content, "logit_bias": bias}))
            assert error["param"].startswith("logit_bias")
