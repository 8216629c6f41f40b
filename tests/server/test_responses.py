"""OpenAI's Responses API over a scripted engine, with a strict checker and the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import openai
import pytest
from enginecore.config import EngineArgs
from enginecore.server.args import ServerArgs

from tests.frontend.toy import ToyTokenizer
from tests.server.asgi import Exchange
from tests.server.checkers import check_error
from tests.server.fake_engine import parrot, running, saying
from tests.server.message_checker import parse_named_events
from tests.server.response_checker import check_response, check_response_stream, same_response
from tests.server.test_messages import CALL, MARKED

PATH = "/v1/responses"
ROLES = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}|{{ m.content }}"
TEMPLATE = (
    ROLES + "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.x }}]{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% if add_generation_prompt %}<go>{% endif %}"
)


def prompt_of(server: Any) -> str:
    return ToyTokenizer().decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def both(server: Any, **body: Any) -> dict[str, Any]:
    """The same request plainly and as a stream; they must be equal but for ids. Returns the plain answer."""
    plain = await server.post(PATH, **{"input": "hi", **body})
    assert plain.status_code == 200, plain.text
    stream = await server.post(PATH, **{"input": "hi", **body}, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    same_response(check_response_stream(stream.text), check_response(plain.json()))
    answer: dict[str, Any] = plain.json()
    return answer


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_text(tokens_per_step: int) -> None:
    async with running(saying("hello world 😀!"), tokens_per_step=tokens_per_step) as server:
        answer = await both(server, metadata={"a": "b"}, user="u")
        (item,) = answer["output"]
        assert item["content"][0]["text"] == "hello world 😀!" and answer["status"] == "completed"
        assert answer["metadata"] == {"a": "b"} and answer["model"] == "toy" and answer["completed_at"]
        answer = await both(server, max_output_tokens=2)
        assert answer["status"] == answer["output"][0]["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"} and answer["usage"]["output_tokens"] == 2
        answer = await both(server, include=["message.output_text.logprobs"], top_logprobs=2)
        logprobs = answer["output"][0]["content"][0]["logprobs"]
        assert len(logprobs) == answer["usage"]["output_tokens"], "one entry a token, the last one included"
        assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode() == "hello world 😀!"
    async with running(saying("")) as server:
        assert (await both(server))["output"] == []


async def test_the_prompt() -> None:
    async with running(saying("yes"), engine_args=EngineArgs(chat_template=TEMPLATE), max_model_len=512) as server:
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
        items = [
            {"role": "user", "content": "a"},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I"}], "status": "x"},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 3}'},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "four"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "five"}]},
        ]
        await both(server, input=items, instructions="S", tools=[tool])
        want = "<system>|S<user>|a<system>|b<assistant>hm|I[f 3][f ]<tool>|four<tool>|five"
        assert prompt_of(server) == want + "(f)<go>"
        await both(server, input=items, instructions="S", tools=[tool], tool_choice="none")
        assert prompt_of(server) == want + "<go>"
        counted = await server.post(f"{PATH}/input_tokens", input=items, instructions="S")
        assert counted.json()["input_tokens"] == len(server.engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_reasoning_and_calls(tokens_per_step: int) -> None:
    said = f"<think>Let me see</think>I call{CALL}{CALL}"
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    engine_args = EngineArgs(chat_template=MARKED)
    async with running(
        saying(said), tokens_per_step=tokens_per_step, engine_args=engine_args, max_model_len=512
    ) as server:
        answer = await both(server, tools=tools)
        kinds = [item["type"] for item in answer["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"] and answer["status"] == "completed"
        assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "Let me see"}]
        assert json.loads(answer["output"][3]["arguments"]) == {"x": 'é"😀', "y": [1]}
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len(ToyTokenizer().encode("Let me see"))
        assert len((await both(server, tools=tools, parallel_tool_calls=False))["output"]) == 3
        await both(server, tools=tools, tool_choice="none", reasoning={"effort": "none"})
        thinking = server.engine.requests[-1].thinking
        assert thinking is not None and thinking.budget == 0
        cut = await both(server, tools=tools, max_output_tokens=100)
        assert [item["status"] for item in cut["output"]] == ["completed"] * 3 + ["incomplete"]
        form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
        await both(server, text=form)
        assert server.engine.requests[-1].grammar


async def test_a_conversation_goes_on() -> None:
    async with running(saying("yes"), engine_args=EngineArgs(chat_template=TEMPLATE), max_model_len=512) as server:
        first = (await server.post(PATH, input="one", instructions="S")).json()
        second = (await server.post(PATH, input="two", previous_response_id=first["id"])).json()
        assert prompt_of(server) == "<user>|one<assistant>|yes<user>|two<go>", "instructions are not inherited"
        await server.post(
            PATH, input=[{"role": "user", "content": "one"}, *first["output"], {"role": "user", "content": "two"}]
        )
        assert prompt_of(server) == "<user>|one<assistant>|yes<user>|two<go>", "its own output is taken back"
        items = (await server.http.get(f"{PATH}/{second['id']}/input_items?order=asc&limit=2")).json()
        assert [item["role"] for item in items["data"]] == ["user", "assistant"] and items["has_more"]
        rest = (await server.http.get(f"{PATH}/{second['id']}/input_items?order=asc&after={items['last_id']}")).json()
        assert rest["data"][0]["content"][0]["text"] == "two" and not rest["has_more"]
        assert (await server.http.delete(f"{PATH}/{first['id']}")).json()["deleted"]
        third = await server.post(PATH, input="three", previous_response_id=second["id"])
        assert third.status_code == 200 and "one<assistant>|yes<user>|two" in prompt_of(server)


async def test_truncation_auto_leaves_out_the_oldest() -> None:
    async with running(parrot, engine_args=EngineArgs(chat_template=TEMPLATE)) as server:
        items = [{"role": "user", "content": text * 20} for text in ("a", "b", "c")]
        response = await server.post(PATH, input=items, instructions="S")
        check_error(response.status_code, response.text, 400, "input")
        await both(server, input=items, instructions="S", truncation="auto", max_output_tokens=3)
        assert prompt_of(server) == "<system>|S<user>|" + "c" * 20 + "<go>"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content.type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x" * 1000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"include": ["secrets"]}, "include"),
        ({"metadata": {"k": "v" * 600}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"top_logprobs": 99}, "top_logprobs"),
    ],
)
async def test_refusals(change: dict[str, Any], param: str) -> None:
    async with running(parrot) as server:
        for stream in (False, True):
            response = await server.post(PATH, **{"input": "hi", **change}, stream=stream)
            error = check_error(response.status_code, response.text, 400)
            assert (error["param"] or "").startswith(param), error
        assert not server.engine.requests and server.llm.num_sequences == 0 and not len(server.app.state.responses)


async def test_the_store_is_bounded_and_every_key_has_its_own() -> None:
    args = ServerArgs(max_stored_responses=3, max_stored_bytes=20_000)
    async with running(saying("yes"), args=args, max_model_len=4096) as server:
        ids = [(await server.post(PATH, input="hi")).json()["id"] for _ in range(5)]
        found = [(await server.http.get(f"{PATH}/{each}")).status_code for each in ids]
        assert found == [404, 404, 200, 200, 200] and len(server.app.state.responses) == 3
        for _ in range(3):
            await server.post(PATH, input="x" * 3000, max_output_tokens=1)
        store = server.app.state.responses
        assert len(store) == 3 and store.size < 20_000
        hidden = (await server.post(PATH, input="hi", store=False)).json()["id"]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            response = await server.http.request(method, f"{PATH}/{hidden}{path}")
            assert check_error(response.status_code, response.text, 404)["code"] == "response_not_found"
        response = await server.post(PATH, input="hi", previous_response_id=hidden)
        check_error(response.status_code, response.text, 404, "previous_response_id")


async def test_in_the_background() -> None:
    async with running(saying("hello world")) as server:
        started = (await server.post(PATH, input="hi", background=True)).json()
        assert started["status"] == "queued"
        while (answer := (await server.http.get(f"{PATH}/{started['id']}")).json())["status"] in (
            "queued",
            "in_progress",
        ):
            await asyncio.sleep(0.005)
        assert answer["status"] == "completed" and answer["output"][0]["content"][0]["text"] == "hello world"
        replay = await server.http.get(f"{PATH}/{started['id']}?stream=true")
        assert check_response_stream(replay.text) == answer
        events = parse_named_events(
            (await server.http.get(f"{PATH}/{started['id']}?stream=true&starting_after=3")).text
        )
        assert events[0]["sequence_number"] == 4
        live = await server.post(PATH, input="hi", background=True, stream=True)
        same_response(check_response_stream(live.text), answer)
        server.engine.pause = True
        started = (await server.post(PATH, input="hi", background=True)).json()
        while not server.engine.num_live:
            await asyncio.sleep(0.001)
        check_error(
            *(lambda r: (r.status_code, r.text))(
                await server.post(PATH, input="x", previous_response_id=started["id"])
            ),
            400,
        )
        cancelled = (await server.http.post(f"{PATH}/{started['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled" and not server.engine.num_live
        assert (await server.http.post(f"{PATH}/{started['id']}/cancel")).json() == cancelled, "again is the same"
        assert not server.llm.num_sequences and server.app.state.in_flight == 0
        server.engine.pause = False
        started = (await server.post(PATH, input="hi", background=True)).json()
        server.engine.die()
        while (answer := server.app.state.responses.get(started["id"], "").response)["status"] in (
            "queued",
            "in_progress",
        ):
            await asyncio.sleep(0.005)
        assert answer["status"] == "failed" and answer["error"]["code"] == "server_error"


async def test_a_stream_that_fails_and_one_that_is_hung_up() -> None:
    async with running(parrot) as server:
        exchange = Exchange(server.app, PATH, {"input": "hi", "stream": True}).start()
        await exchange.wait_for(3)
        exchange.hang_up()
        assert exchange.task is not None
        await exchange.task
        assert not server.engine.num_live and not len(server.app.state.responses)
        exchange = Exchange(server.app, PATH, {"input": "hi", "stream": True}).start()
        await exchange.wait_for(3)
        server.engine.die()
        assert exchange.task is not None
        await exchange.task
        last = parse_named_events(exchange.body.decode())[-1]
        assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "server_error"


async def test_the_official_client() -> None:
    async with running(saying("hello world")) as server:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
        async with openai.AsyncOpenAI(api_key="k", base_url="http://toy/v1", http_client=http, max_retries=0) as client:
            plain = await client.responses.create(model="toy", input="hi")
            assert plain.output_text == "hello world" and plain.usage is not None
            async with client.responses.stream(model="toy", input="hi") as stream:
                kinds = [event.type async for event in stream]
                whole = await stream.get_final_response()
            assert whole.output_text == "hello world" and kinds[-1] == "response.completed"
            assert (await client.responses.retrieve(plain.id)).output_text == "hello world"
            items = await client.responses.input_items.list(plain.id)
            assert [item.type for item in items.data] == ["message"]
            assert (await client.responses.input_tokens.count(model="toy", input="hi")).input_tokens
            await client.responses.delete(plain.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(plain.id)
            background = await client.responses.create(model="toy", input="hi", background=True)
            assert (await client.responses.cancel(background.id)).status in ("cancelled", "completed")
