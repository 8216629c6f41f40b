"""Anthropic's Messages API over a scripted engine, with a strict checker and the official client."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import httpx2
import pytest
from enginecore.config import EngineArgs
from enginecore.request import EngineRequest
from enginecore.server.args import ServerArgs

from tests.frontend.toy import ToyTokenizer
from tests.server.asgi import Exchange
from tests.server.fake_engine import parrot, running, saying
from tests.server.message_checker import check_message, check_message_stream, parse_named_events

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
GOOD: dict[str, Any] = {"model": "toy", "max_tokens": 20, "messages": HI}
ROOM: dict[str, Any] = {"max_model_len": 512}


def prompt_of(server: Any, index: int = -1) -> str:
    return ToyTokenizer().decode(server.engine.requests[index].prompt_token_ids, skip_special_tokens=False)


async def both(server: Any, **body: Any) -> dict[str, Any]:
    """The same request plainly and as a stream; they must be equal but for ids. Returns the plain answer."""
    plain = await server.post(PATH, **{**GOOD, **body})
    assert plain.status_code == 200, plain.text
    stream = await server.post(PATH, **{**GOOD, **body}, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    answer, streamed = check_message(plain.json()), check_message_stream(stream.text)
    assert without_ids(answer) == without_ids(streamed)
    return answer


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "id": "", "content": [{**block, "id": ""} for block in answer["content"]]}


async def test_text_and_the_reasons_to_stop() -> None:
    async with running(saying("hello world 😀!"), tokens_per_step=2) as server:
        answer = await both(server)
        assert answer["content"] == [{"type": "text", "text": "hello world 😀!"}] and answer["model"] == "toy"
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
        answer = await both(server, stop_sequences=["zzz", "wor"])
        assert answer["content"] == [{"type": "text", "text": "hello "}]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "wor")
        answer = await both(server, max_tokens=2)
        assert answer["stop_reason"] == "max_tokens" and answer["usage"]["output_tokens"] == 2
        answer = await both(server, stop_sequences=["hello"])
        assert answer["content"] == [], "there is no empty block"
    async with running(parrot) as server:
        answer = await both(server, max_tokens=100_000)
        assert answer["stop_reason"] == "model_context_window_exceeded", "not more than fits, and said so"


async def test_the_prompt() -> None:
    """System texts, turns of one role merged, tools, calls and their results, thinking, documents and a prefill."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}{% endfor %}"
        "{% for t in tools or [] %}({{ t.function.name }} {{ t.function.parameters.type }}){% endfor %}"
        "{% if add_generation_prompt %}<go>{% endif %}"
    )
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    call = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "text", "text": "I call"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 3}},
    ]
    result = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "four"}]},
        {"type": "tool_result", "tool_use_id": "t1", "content": "bad", "is_error": True},
        {"type": "text", "text": "and"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "doc"}, "title": "T"},
    ]
    async with running(parrot, engine_args=EngineArgs(chat_template=template), **ROOM) as server:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": call},
            {"role": "user", "content": result},
        ]
        system = [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}]
        want = "<system>|S1\nS2<user>|a\nb<assistant>hm|I call[f 3]<tool>|four<tool>|Error: bad<user>|and\nT\ndoc"
        await both(server, system=system, messages=messages, tools=[tool])
        assert prompt_of(server) == want + "(f object)<go>"
        await both(server, system="S1\nS2", messages=messages, tools=[tool], tool_choice={"type": "none"})
        assert prompt_of(server) == want + "<go>"
        messages.append({"role": "assistant", "content": "So far "})
        await both(server, system="S1\nS2", messages=messages)
        assert prompt_of(server) == want + "<assistant>|So far ", "a prefill goes on without an end of turn"


TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
#: By its marks the way to think and to call is known.
MARKED = ToyTokenizer.chat_template + "{# <think> </think> <tool_call> #}"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é\\"😀", "y": [1]}}\n</tool_call>'


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_thinking_and_calls(tokens_per_step: int) -> None:
    said = f"<think>Let me see</think>I call{CALL}{CALL}"
    engine_args = EngineArgs(chat_template=MARKED)
    async with running(saying(said), tokens_per_step=tokens_per_step, engine_args=engine_args, **ROOM) as server:
        answer = await both(server, tools=TOOLS, max_tokens=300, thinking={"type": "enabled", "budget_tokens": 99})
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"] and answer["stop_reason"] == "tool_use"
        assert answer["content"][0]["thinking"] == "Let me see" and answer["content"][1]["text"] == "I call"
        assert answer["content"][3]["input"] == {"x": 'é"😀', "y": [1]} and answer["content"][3]["name"] == "f"
        assert answer["content"][2]["id"] != answer["content"][3]["id"]
        thinking = server.engine.requests[0].thinking
        assert thinking is not None and thinking.budget == 99
        one = {"type": "auto", "disable_parallel_tool_use": True}
        answer = await both(server, tools=TOOLS, tool_choice=one, max_tokens=300)
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
        answer = await both(server, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=300)
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"], "none is none"


async def test_a_call_that_is_cut_off_is_not_said_to_be_whole() -> None:
    async with running(saying(CALL), engine_args=EngineArgs(chat_template=MARKED), **ROOM) as server:
        plain = await server.post(PATH, **{**GOOD, "max_tokens": 55}, tools=TOOLS)
        answer = check_message(plain.json())
        assert answer["stop_reason"] == "max_tokens" and answer["content"][0]["type"] == "tool_use"
        assert set(answer["content"][0]["input"]) <= {"x"}


async def test_counted_tokens_are_those_of_the_prompt() -> None:
    async with running(parrot) as server:
        fields: dict[str, Any] = {"messages": HI, "system": "be nice", "model": "toy"}
        counted = (await server.post(f"{PATH}/count_tokens", **fields)).json()
        answer = await both(server, **fields)
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
        assert counted["input_tokens"] == len(server.engine.requests[0].prompt_token_ids)


async def test_cache_control_and_its_figures() -> None:
    def cached(request: EngineRequest) -> tuple[list[int], bool]:
        return [65, 66], True

    async with running(cached, **ROOM) as server:
        long = "x" * 100
        marked = [{"type": "text", "text": long, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        body: dict[str, Any] = {"system": marked, "messages": HI}
        usage = (await both(server, **body))["usage"]
        head = len(ToyTokenizer().encode("<|start|>system\n" + long))
        assert usage["cache_creation_input_tokens"] == head - head % 16 > 90, "whole blocks before the mark"
        assert usage["cache_creation"]["ephemeral_1h_input_tokens"] == usage["cache_creation_input_tokens"]
        assert server.engine.requests[0].pin_prefix == (usage["cache_creation_input_tokens"], 3600)
        assert server.engine.requests[0].pin_prefix == (usage["cache_creation_input_tokens"], 3600.0)
        total = len(server.engine.requests[0].prompt_token_ids)
        assert usage["input_tokens"] == total - usage["cache_creation_input_tokens"]
        server.engine.cached = 64
        usage = (await both(server, **body))["usage"]
        assert usage["cache_read_input_tokens"] == 64
        assert (
            sum(usage[k] for k in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")) == total
        )
        usage = (await both(server, system=long, messages=HI))["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (total, 0), "nothing was asked to be cached"
        usage = (await both(server, **body, cache_control={"type": "ephemeral"}))["usage"]
        assert usage["cache_creation"]["ephemeral_5m_input_tokens"] > 30, "the last block is marked"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, "maximum context length"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop"),
        ({"temperature": "hot"}, "temperature"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "odd"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"cache_control": {"type": "ephemeral", "ttl": "9d"}}, "cache_control"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(change: dict[str, Any], told: str, stream: bool) -> None:
    async with running(parrot) as server:
        response = await server.post(PATH, **{**GOOD, **change}, stream=stream)
        assert response.status_code == 400, response.text
        error = response.json()
        assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
        assert told in error["error"]["message"] and error["request_id"] == response.headers["request-id"]
        assert not server.engine.requests and server.llm.num_sequences == 0


async def test_the_envelope_of_other_errors() -> None:
    args = ServerArgs(api_keys=("k",), max_body_bytes=2000, max_waiting=0)
    async with running(parrot, args=args, max_num_seqs=1) as server:
        key = {"x-api-key": "k"}
        cases: list[tuple[int, str, dict[str, Any]]] = [
            (401, "authentication_error", {"json": GOOD}),
            (404, "not_found_error", {"json": {**GOOD, "model": "other"}, "headers": key}),
            (413, "request_too_large", {"json": {**GOOD, "system": "x" * 5000}, "headers": key}),
            (400, "invalid_request_error", {"content": b"{", "headers": key}),
            (415, "invalid_request_error", {"content": b"{}", "headers": {**key, "content-type": "text/plain"}}),
        ]
        for status, kind, options in cases:
            response = await server.http.post(PATH, **options)
            assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
        assert (await server.http.get(PATH, headers=key)).json()["error"]["type"] == "invalid_request_error"
        server.engine.pause = True
        waiting = asyncio.create_task(server.http.post(PATH, json=GOOD, headers=key))
        while not server.engine.num_live:
            await asyncio.sleep(0.001)
        response = await server.http.post(f"{PATH}/count_tokens", json={"model": "toy", "messages": HI}, headers=key)
        assert response.status_code == 200, "counting needs no room"
        response = await server.http.post(PATH, json=GOOD, headers=key)
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        server.engine.pause = False
        assert (await waiting).status_code == 200


async def test_an_error_in_mid_stream_is_an_event() -> None:
    async with running(parrot) as server:
        exchange = Exchange(server.app, PATH, {**GOOD, "max_tokens": 40, "stream": True}).start()
        await exchange.wait_for(3)
        server.engine.die()
        assert exchange.task is not None
        await exchange.task
        last = parse_named_events(exchange.body.decode())[-1]
        assert last["type"] == "error" and last["error"]["type"] == "api_error"


async def test_the_official_client() -> None:
    async with running(saying("hello world 😀!"), args=ServerArgs(api_keys=("k",))) as server:
        transport = httpx2.ASGITransport(server.app)
        async with anthropic.AsyncAnthropic(
            api_key="k", base_url="http://toy", http_client=httpx2.AsyncClient(transport=transport), max_retries=0
        ) as client:
            plain = await client.messages.create(**GOOD)
            assert isinstance(plain.content[0], anthropic.types.TextBlock) and plain._request_id
            async with client.messages.stream(**GOOD) as stream:
                kinds = [event.type async for event in stream]
                whole = await stream.get_final_message()
            assert whole.to_dict() | {"id": ""} == plain.to_dict() | {"id": ""}
            assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
            counted = await client.messages.count_tokens(model="toy", messages=HI)  # type: ignore[arg-type]
            assert counted.input_tokens == plain.usage.input_tokens
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.messages.create(**{**GOOD, "max_tokens": -1})
            assert caught.value.request_id and "max_tokens" in str(caught.value)
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**GOOD, "model": "x"})
            (model,) = (await client.models.list()).data
            assert model == await client.models.retrieve("toy") and (model.id, model.type) == ("toy", "model")
            wrong = client.with_options(api_key="nope")
            with pytest.raises(anthropic.AuthenticationError):
                await wrong.messages.create(**GOOD)


async def test_a_hang_up_frees_the_engine() -> None:
    async with running(parrot) as server:
        exchange = Exchange(server.app, PATH, {**GOOD, "max_tokens": 40, "stream": True}).start()
        await exchange.wait_for(3)
        exchange.hang_up()
        assert exchange.task is not None
        await exchange.task
        assert not server.engine.num_live and not server.llm.num_sequences
