from __future__ import annotations

from typing import Any

import pytest

from tests.frontend.toy import ToyTokenizer
from tests.server.checkers import check_chat, check_chat_stream, check_error, same_answer
from tests.server.fake_engine import parrot, running, saying

HI = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


async def both(server: Any, n: int = 1, **body: Any) -> dict[str, Any]:
    """The same request plainly and as a stream; they must be equal. Returns the plain answer."""
    body = {"messages": HI, "n": n, **body}
    plain = await server.post(PATH, **body)
    assert plain.status_code == 200, plain.text
    stream = await server.post(PATH, **body, stream=True, stream_options={"include_usage": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    answer = check_chat(plain.json(), n)
    same_answer(check_chat_stream(stream.text, n, usage=True), answer, cached=True)
    return answer


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_text(tokens_per_step: int) -> None:
    async with running(saying("hello world 😀!"), tokens_per_step=tokens_per_step) as server:
        answer = await both(server)
        assert answer["choices"][0]["message"]["content"] == "hello world 😀!"
        assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["stop_reason"] is None
        prompt = ToyTokenizer().encode("<|start|>user\nhi<|end|>\n<|start|>assistant\n")
        assert server.engine.requests[0].prompt_token_ids == prompt
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert server.engine.requests[0].max_tokens == 64 - len(prompt), "all the context that is left"


@pytest.mark.parametrize("stop", [["wor"], "wor", [" hello", "zzz", "o w"], ["\U0001f600"]])
async def test_stop_strings(stop: Any) -> None:
    async with running(saying("hello world 😀!")) as server:
        answer = await both(server, stop=stop, logprobs=True, top_logprobs=2)
        choice = answer["choices"][0]
        text = "hello world 😀!"
        found = min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
        assert choice["message"]["content"] == text[:found] and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] in stop
        assert server.engine.num_live == 0
        kept = await both(server, stop=stop, include_stop_str_in_output=True)
        assert kept["choices"][0]["message"]["content"] == text[:found] + choice["stop_reason"]


async def test_several_choices() -> None:
    async with running(parrot) as server:
        answer = await both(server, n=3, max_completion_tokens=5, max_tokens=9, seed=7)
        assert answer["usage"]["completion_tokens"] == 15
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert len(set(texts)) == 3 and all(choice["finish_reason"] == "length" for choice in answer["choices"])
        assert [request.seed for request in server.engine.requests[:3]] == [7, 8, 9]


async def test_logprobs() -> None:
    async with running(saying("a😀b"), tokens_per_step=1) as server:
        answer = await both(server, logprobs=True, top_logprobs=5)
        content = answer["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a😀b"
        assert content[-1]["token"] == "<|end|>" and content[-1]["bytes"] == []
        assert [len(entry["top_logprobs"]) for entry in content] == [5] * len(content)
        assert content[0]["logprob"] == -1.5 and content[0]["top_logprobs"][2]["logprob"] == -9999.0
        assert [
            e["top_logprobs"] for e in (await both(server, logprobs=True))["choices"][0]["logprobs"]["content"]
        ] == ([[]] * len(content))
        ids = await both(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
        assert ids["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"


async def test_partial_characters_in_logprobs_have_bytes() -> None:
    smile = list("😀".encode())
    async with running(lambda request: (smile, True)) as server:
        content = (await both(server, logprobs=True))["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[byte] for byte in smile] + [[]]
        assert content[0]["token"] == "�"


async def test_usage_only_when_asked_for() -> None:
    async with running(saying("hello")) as server:
        for options in (None, {}, {"include_usage": False}):
            text = (await server.post(PATH, messages=HI, stream=True, stream_options=options)).text
            check_chat_stream(text)
            assert '"usage"' not in text
        every = {"include_usage": True, "continuous_usage_stats": True}
        text = (await server.post(PATH, messages=HI, stream=True, stream_options=every)).text
        assert text.count('"completion_tokens":1,') == 2, "the role chunk and the first token"
        check_error(*_parts(await server.post(PATH, messages=HI, stream_options={})), 400, "stream_options")


def _parts(response: Any) -> tuple[int, bytes]:
    return response.status_code, response.content


async def test_token_ids_and_prompt_logprobs() -> None:
    async with running(saying("ab")) as server:
        answer = (await server.post(PATH, messages=HI, return_token_ids=True, prompt_logprobs=1)).json()
        assert answer["choices"][0]["token_ids"] == [267, 272]
        assert len(answer["prompt_token_ids"]) == len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert answer["prompt_logprobs"][0] is None
        check_error(
            *_parts(await server.post(PATH, messages=HI, prompt_logprobs=1, stream=True)), 400, "prompt_logprobs"
        )


async def test_prefill_and_echo() -> None:
    async with running(saying(" Paris")) as server:
        messages = [*HI, {"role": "assistant", "content": "It is "}]
        answer = await both(server, messages=messages, continue_final_message=True, echo=True)
        assert answer["choices"][0]["message"]["content"] == "It is  Paris"
        prompt = ToyTokenizer().decode(server.engine.requests[0].prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith("<|start|>assistant\nIt is ")


async def test_tools_go_to_the_template_unless_choice_is_none() -> None:
    tokenizer = ToyTokenizer()
    tokenizer.chat_template = "{{ tools | tojson if tools else 'no tools' }}"
    tool = {"type": "function", "function": {"name": "f"}}
    async with running(saying("x"), tokenizer=tokenizer, max_model_len=200) as server:
        for choice, shown in ((None, True), ("auto", True), ("none", False)):
            await both(server, tools=[tool], tool_choice=choice)
            prompt = tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
            assert ('"name": "f"' in prompt) is shown
        assert server.engine.requests[-1].grammar is None
        forced: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "f"}})
        for choice in forced:
            assert (await server.post(PATH, messages=HI, tools=[tool], tool_choice=choice)).status_code == 200
            assert server.engine.requests[-1].grammar is not None
            check_error(*_parts(await server.post(PATH, messages=HI, tool_choice=choice)), 400, "tool_choice")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"), ({"messages": "x"}, "messages"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "foo", "content": "x"}]}, "messages[0].role"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"), ({"logprobs": 5}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 65}, "max_tokens"), ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 5.5}, "max_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format.json"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"), ({"thinking_token_budget": -1}, "thinking_token_budget"),
    ({"tools": [{}]}, "tools[0]"), ({"tools": "x"}, "tools"), ({"tool_choice": "maybe"}, "tool_choice"),
    ({"audio": {}}, "audio"), ({"modalities": ["audio"]}, "modalities"), ({"functions": [{}]}, "functions"),
    ({"guided_json": {}}, "guided_json"), ({"best_of": 2}, "best_of"), ({"stream": "yes"}, "stream"),
    ({"messages": [{"role": "user", "content": "x" * 100}]}, "messages"),
    ({"n": 0}, "n"), ({"n": 129}, "n"), ({"stream_options": {"include_usage": 1}, "stream": True},
                                        "stream_options.include_usage"),
]  # fmt: skip


async def test_bad_requests() -> None:
    async with running(saying("x")) as server:
        for body, param in BAD:
            for stream in ({}, {"stream": True}):
                response = await server.post(PATH, **{"messages": HI, **stream, **body})
                check_error(*_parts(response), 400, param)
        assert server.engine.requests == [] and server.llm.num_sequences == 0
        check_chat((await server.post(PATH, messages=HI)).json())


async def test_template_errors_are_the_clients() -> None:
    tokenizer = ToyTokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') if messages | length > 1 else 'x' }}"
    async with running(saying("x"), tokenizer=tokenizer) as server:
        error = check_error(*_parts(await server.post(PATH, messages=[*HI, *HI])), 400, "messages")
        assert "roles must alternate" in error["message"]
    tokenizer.chat_template = None  # type: ignore[assignment]
    async with running(saying("x"), tokenizer=tokenizer) as server:
        error = check_error(*_parts(await server.post(PATH, messages=HI)), 400)
        assert "supply one at start-up" in error["message"]
        assert (await server.post("/v1/completions", prompt="x")).status_code == 200


async def test_unsupported_fields_that_ask_for_nothing_are_fine() -> None:
    async with running(saying("x")) as server:
        harmless = {"modalities": ["text"], "service_tier": "auto", "store": False, "audio": None, "user": "me",
                    "metadata": {"a": 1}, "response_format": {"type": "text"}, "parallel_tool_calls": True}  # fmt: skip
        assert (await server.post(PATH, messages=HI, **harmless)).status_code == 200
