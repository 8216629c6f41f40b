"""F36: a prompt beyond the context is a 400 with the right numbers, before anything is scheduled or streamed."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore import LLM, SamplingParams

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, refused, unharmed
from tests.serving import ServerProcess

LIMIT = 1024


@pytest.mark.parametrize("stream", [False, True])
def test_completions(sim_server: ServerProcess, stream: bool) -> None:
    before = sim_server.metrics()
    with unharmed(sim_server):
        for prompt, count in (
            ([5] * (LIMIT + 1), LIMIT + 1), (" a" * (2 * LIMIT), 2 * LIMIT), ([5] * (10 * LIMIT), 10 * LIMIT),
            ([5] * LIMIT, LIMIT),
        ):  # fmt: skip
            answer = sim_server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 7, "stream": stream})
            error = refused(answer, param="prompt")
            assert error["code"] == "context_length_exceeded"
            assert all(str(number) in error["message"].split() for number in (LIMIT, count, 7)), error
        error = refused(sim_server.post(COMPLETIONS, {"prompt": "x" * 1_000_000, "stream": stream}), param="prompt")
        assert error["code"] == "context_length_exceeded" and "1000000 characters" in error["message"]
    served = sim_server.metrics()["enginecore:prompt_tokens_total"] - before["enginecore:prompt_tokens_total"]
    assert served < 20, "only what `unharmed` asks was computed"


@pytest.mark.parametrize("stream", [False, True])
def test_chat(sim_server: ServerProcess, stream: bool) -> None:
    for times in (2, 10):
        body: dict[str, Any] = {"messages": [user(" a" * times * LIMIT)], "stream": stream}
        error = refused(sim_server.post(CHAT, body), param="messages")
        assert error["code"] == "context_length_exceeded"
        count = next(int(word) for word in error["message"].split() if word.isdigit() and int(word) > LIMIT)
        assert times * LIMIT < count < times * LIMIT + 50


def test_truncation_keeps_the_end(sim_server: ServerProcess) -> None:
    prompt = list(range(3, 3 + 2 * LIMIT))
    body = {"max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    kept = sim_server.complete(prompt=prompt, truncate_prompt_tokens=50, **body)
    assert kept["choices"][0]["prompt_token_ids"] == prompt[-50:] and kept["usage"]["prompt_tokens"] == 50
    kept = sim_server.complete(prompt=prompt, truncate_prompt_tokens=-1, **body)
    assert kept["choices"][0]["prompt_token_ids"] == prompt[-(LIMIT - 4) :], "as much as leaves room for the answer"
    refused(sim_server.post(COMPLETIONS, {"prompt": prompt, "truncate_prompt_tokens": LIMIT + 1}), param="prompt")


def test_python() -> None:
    with LLM("smollm2-135m", device="sim", max_model_len=64, num_blocks=8, max_num_seqs=2) as llm:
        for prompt, count in (([5] * 65, 65), (" a" * 640, 640), ([5] * 64, 64)):
            with pytest.raises(ValueError, match=rf"prompt 0: .*64 tokens.* {count} tokens and 3 output tokens"):
                llm.generate([prompt], SamplingParams(max_tokens=3), use_tqdm=False)
        with pytest.raises(ValueError, match=r"prompt 0: .*64 tokens"):
            llm.chat([user(" a" * 100)], use_tqdm=False)
        assert not llm._client.has_work()
