from __future__ import annotations

from typing import Any

import pytest
from enginecore.request import BeamOptions
from enginecore.server.args import ServerArgs

from tests.frontend.toy import EOS, ToyTokenizer
from tests.server.checkers import check_completion, check_completion_stream, check_error, same_answer
from tests.server.fake_engine import parrot, running, saying

PATH = "/v1/completions"


async def both(server: Any, choices: int = 1, **body: Any) -> dict[str, Any]:
    """The same request plainly and as a stream; they must be equal. Returns the plain answer."""
    echo = bool(body.get("echo"))
    plain = await server.post(PATH, **body)
    assert plain.status_code == 200, plain.text
    stream = await server.post(PATH, **body, stream=True, stream_options={"include_usage": True})
    answer = check_completion(plain.json(), choices, echo=echo)
    same_answer(check_completion_stream(stream.text, choices, usage=True, echo=echo), answer, cached=True)
    return answer


def parts(response: Any) -> tuple[int, bytes]:
    return response.status_code, response.content


async def test_prompts_of_every_form_and_the_order_of_choices() -> None:
    async with running(parrot) as server:
        for prompt, texts in (
            ("abc", ["abc"]), ([261], ["the"]), (["abc", "the"], ["abc", "the"]), ([[261], [262, 97]], ["the", " the"]),
            (["the", "the", "the"], ["the"] * 3),
        ):  # fmt: skip
            answer = await both(server, len(texts), prompt=prompt, max_tokens=1)
            assert [choice["text"] for choice in answer["choices"]] == texts
        answer = await both(server, 4, prompt=["ab", "xy"], n=2, max_tokens=2)
        assert [choice["text"] for choice in answer["choices"]] == ["abab", "abab", "xy", "yx"]
        assert answer["usage"] == {
            "prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens":
            0}, }  # fmt: skip


async def test_max_tokens_default_and_limits() -> None:
    async with running(parrot) as server:
        assert (await both(server, prompt="xyz"))["usage"]["completion_tokens"] == 16
        assert (await both(server, prompt="xyz", min_tokens=20))["usage"]["completion_tokens"] == 20
        assert (await both(server, prompt=[120] * 60))["usage"]["completion_tokens"] == 4, "the default is clamped"
        error = check_error(*parts(await server.post(PATH, prompt=[120] * 60, max_tokens=5)), 400, "max_tokens")
        assert error["code"] == "context_length_exceeded"
        assert all(number in error["message"] for number in ("64", "60", "5"))


@pytest.mark.parametrize("prompt", ["the 😀 abc", [261, 32, *"😀".encode()], [EOS, 97]])
@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_echo_with_logprobs(prompt: Any, max_tokens: int) -> None:
    async with running(parrot) as server:
        answer = await both(server, 2, prompt=prompt, n=2, max_tokens=max_tokens, echo=True, logprobs=2)
        ids = prompt if isinstance(prompt, list) else ToyTokenizer().encode(prompt)
        text = prompt if isinstance(prompt, str) else ToyTokenizer().decode(ids)
        for choice in answer["choices"]:
            assert choice["text"].startswith(text) and (max_tokens or choice["text"] == text)
            assert len(choice["logprobs"]["tokens"]) == len(ids) + max_tokens
            assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert not server.engine.requests[0].cached_prompt


async def test_echo_without_logprobs_and_stop_in_the_prompt() -> None:
    async with running(saying("xyz!")) as server:
        answer = await both(server, 2, prompt=["a!", "b!"], echo=True, stop="!")
        assert [choice["text"] for choice in answer["choices"]] == ["a!xyz", "b!xyz"]


async def test_logprobs() -> None:
    async with running(saying("a😀")) as server:
        logprobs = (await both(server, prompt="x", logprobs=3))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["a", "😀", ""] and logprobs["text_offset"] == [0, 1, 2]
        assert list(logprobs["top_logprobs"][0]) == ["b", "a", "c"] and logprobs["top_logprobs"][0]["c"] == -9999.0
        chosen = (await both(server, prompt="x", logprobs=0))["choices"][0]["logprobs"]["top_logprobs"][0]
        assert chosen == {"a": -1.5}
        smile = list("😀".encode())
    async with running(lambda request: (smile, True)) as server:
        logprobs = (await both(server, prompt="x", logprobs=2))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["", "", "", "😀", ""] and "bytes:\\xf0" in logprobs["top_logprobs"][0]


async def test_best_of() -> None:
    async with running(parrot) as server:
        answer = check_completion((await server.post(PATH, prompt="ab", n=2, best_of=4, max_tokens=3)).json(), 2)
        assert answer["usage"]["completion_tokens"] == 12 and answer["choices"][0]["logprobs"] is None
        check_error(*parts(await server.post(PATH, prompt="a", n=1, best_of=2, stream=True)), 400, "best_of")
        check_error(*parts(await server.post(PATH, prompt="a", n=2, best_of=1)), 400, "best_of")


async def test_extras() -> None:
    async with running(saying("ab")) as server:
        body = {"prompt": "xy", "return_token_ids": True, "prompt_logprobs": 1}
        (choice,) = (await server.post(PATH, **body)).json()["choices"]
        assert choice["token_ids"] == [267, EOS] and choice["prompt_token_ids"] == [120, 121]
        assert choice["prompt_logprobs"][0] is None and list(choice["prompt_logprobs"][1]) == ["121", "122"]
        text = (await server.post(PATH, prompt="xy", return_token_ids=True, stream=True)).text
        assert '"token_ids":[267]' in text and text.count('"prompt_token_ids":[120,121]') == 1
        kept = await both(server, prompt="abcdef", truncate_prompt_tokens=2, skip_special_tokens=False, max_tokens=9)
        assert kept["usage"]["prompt_tokens"] == 2
        await both(server, prompt="x", cache_salt="me", logit_bias={"5": -100, "6": 1.5}, seed=None, top_k=-1)
        request = server.engine.requests[-1]
        assert request.cache_salt == "me" and request.params.logit_bias == {5: -100.0, 6: 1.5}


NUMBERS = (
    "max_tokens",
    "n",
    "min_tokens",
    "top_k",
    "logprobs",
    "truncate_prompt_tokens",
    "priority",
    "seed",
    "best_of",
)
BAD: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in NUMBERS for value in (2**64, 10**400, True, 1.5, "5")),
    *(({name: 2**31}, name) for name in NUMBERS if name not in ("seed", "priority")),
    ({"prompt": None}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": {}}, "prompt"),
    ({"prompt": 5}, "prompt"), ({"prompt": ["a", ""]}, "prompt[1]"), ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"), ({"prompt": [1, -1]}, "prompt"), ({"prompt": [274]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [[1], [300]]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt"), ({"prompt": "x" * 65}, "prompt"), ({"prompt": "x" * 100_000}, "prompt"),
    ({"prompt": [1] * 5000}, "prompt"), ({"prompt": ["ok", "x" * 99]}, "prompt[1]"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": -1, "echo": True},
    "max_tokens"), ({"max_tokens": 10**6}, "max_tokens"), ({"logprobs": 6}, "logprobs"), ({"logprobs": -1}, "logprobs"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -1}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"), ({"temperature": 10**400},
    "temperature"), ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop"), ({"stop": [1]}, "stop[0]"), ({"stop": [None]},
    "stop[0]"), ({"stop": ["a"] * 10_000}, "stop"), ({"stop": 5}, "stop"),
    ({"bad_words": [""]}, "bad_words"), ({"bad_words": [" "]}, "bad_words"), ({"bad_words": "x"}, "bad_words"),
    *(({name: [token]}, name) for name in ("stop_token_ids", "allowed_token_ids") for token in (-1, 274, 2**31, 2**63)),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"stop_token_ids": ["5"]}, "stop_token_ids[0]"),
    *(({"logit_bias": {key: 1}}, "logit_bias") for key in ("abc", "1.5", "-1", "274", str(2**63), "9" * 400, "")),
    ({"logit_bias": {"1": 101}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"suffix": "x"}, "suffix"), ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"), *(({"use_beam_search": True, "n": 2, **field}, next(iter(field)))
    for field in ({"top_p": 0.5}, {"temperature": 0.5}, {"stop": "x"}, {"seed": 1}, {"best_of": 65}, {"n": 65},
    {"n": 0}, {"n": 2, "best_of": 1}, {"early_stopping": "soon"}, {"length_penalty": "x"})), ({"response_format":
    {"type": "xml"}}, "response_format"),
    ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": 5}, "cache_salt"), ({"priority": 1}, "priority"),
    ({"echo": "yes"}, "echo"), ({"stream_options": {}}, "stream_options"), ({"model": 5}, "model"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"truncate_prompt_tokens": -2},
    "truncate_prompt_tokens"), ]  # fmt: skip


async def test_bad_requests_name_the_field_and_harm_nobody() -> None:
    async with running(parrot) as server:
        for body, param in BAD:
            response = await server.post(PATH, **{"prompt": "ab", **body})
            assert response.status_code == 400, (body, response.text)
            error = check_error(*parts(response), 400)
            assert error["param"] == param, (body, error)
        assert server.engine.requests == [] and server.llm.num_sequences == 0
        await both(server, prompt="ab")


async def test_good_edges() -> None:
    async with running(parrot, scheduling_policy="priority") as server:
        good: tuple[dict[str, Any], ...] = (
            {"seed": 0}, {"seed": -1}, {"seed": 2**63 - 1}, {"top_k": 0}, {"stop": []}, {"stop": None},
            {"priority": -(2**63)}, {"temperature": 1e-10}, {"logprobs": None}, {"max_tokens": None},
            {"best_of": 1}, {"suffix": None}, {"suffix": ""}, {"n": 1},
        )  # fmt: skip
        for body in good:
            await both(server, prompt="ab", **body)


async def test_a_request_that_the_engine_refuses() -> None:
    async with running(parrot) as server:
        server.engine.refuse = "the request needs 99 KV blocks; the cache has 64"
        for stream in (False, True):
            error = check_error(*parts(await server.post(PATH, prompt=["ab", "cd"], stream=stream)), 400)
            assert "99 KV blocks" in error["message"]
        server.engine.refuse = None
        assert server.llm.num_sequences == 0
        await both(server, prompt="ab")


async def test_defaults_of_the_operator() -> None:
    from enginecore.server.args import ServerArgs

    args = ServerArgs(override_generation_config={"temperature": 0.25, "max_new_tokens": 5, "top_k": 3})
    async with running(parrot, args=args) as server:
        answer = await both(server, prompt="ab", top_k=7, temperature=None)
        params = server.engine.requests[-1].params
        assert (params.temperature, params.top_k, answer["usage"]["completion_tokens"]) == (0.25, 7, 5)
        chat = await server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
        assert chat.json()["usage"]["completion_tokens"] == 5


async def test_beam_search_on_both_routes() -> None:
    args = ServerArgs(override_generation_config={"temperature": 0.3, "top_p": 0.5})
    async with running(parrot, args=args) as server:
        answer = await both(
            server, 2, prompt="xyz", use_beam_search=True, n=2, best_of=3, max_tokens=4, temperature=0, logprobs=1,
            length_penalty=0.5, early_stopping="never",
        )  # fmt: skip
        assert [choice["text"] for choice in answer["choices"]] == ["xyzx", "yzxy"]
        assert answer["usage"]["completion_tokens"] == 8
        assert server.engine.requests[0].params.beam == BeamOptions(3, 0.5, "never")
        assert len(server.engine.requests) == 2, "one request a search"
        body = {"messages": [{"role": "user", "content": "abc"}], "use_beam_search": True, "n": 2, "max_tokens": 3}
        chat = await server.post("/v1/chat/completions", **body)
        assert chat.status_code == 200, chat.text
        assert [choice["index"] for choice in chat.json()["choices"]] == [0, 1]
        assert server.engine.requests[-1].params.beam == BeamOptions(2)
        assert check_error(*parts(await server.post("/v1/chat/completions", **body, stop="x")), 400, "stop")
