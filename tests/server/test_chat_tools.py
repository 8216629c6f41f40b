"""Chats with calls and reasoning, over an engine that says what the test wants; plain and streamed are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.errors import ParameterError
from enginecore.server.args import ServerArgs

from tests.frontend.toy import ToyTokenizer
from tests.server.checkers import check_error
from tests.server.fake_engine import Running, running, saying
from tests.server.tool_checker import read_plain, read_stream

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
ARGUMENTS = json.dumps({"city": 'Łódź "x" \\ {😀}\n', "days": 2}, ensure_ascii=False)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
         {"type": "function", "function": {"name": "now"}}]  # fmt: skip
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES = ServerArgs(tool_call_parser="hermes", reasoning_parser="none")
THINKING = ServerArgs(tool_call_parser="hermes", reasoning_parser="qwen3")


async def both(server: Running, n: int = 1, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": HI, "n": n, "tools": TOOLS, **body}
    plain = await server.post(PATH, **body)
    assert plain.status_code == 200, plain.text
    choices = read_plain(plain.json())
    assert len(choices) == n and read_stream((await server.post(PATH, **body, stream=True)).text, n) == choices
    return choices


@pytest.mark.parametrize("tokens_per_step", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        ("Hello.", "Hello.", [], "stop"), (f"Let me see.\n{CALL}", "Let me see.", ["weather"], "tool_calls"),
        (f"{CALL}\n{NOW}", None, ["weather", "now"], "tool_calls"), ("<tool_call>oops", "<tool_call>oops", [], "stop"),
    ],
)  # fmt: skip
async def test_calls(tokens_per_step: int, text: str, content: str | None, calls: list[str], reason: str) -> None:
    async with running(saying(text), args=HERMES, tokens_per_step=tokens_per_step, max_model_len=512) as server:
        (choice,) = await both(server)
        assert (choice["content"], choice["finish_reason"]) == (content, reason)
        assert choice["calls"] == [[name, ARGUMENTS if name == "weather" else "{}"] for name in calls]
        for several in await both(server, n=3):
            assert several == choice


async def test_one_call_at_most_without_parallel_tool_calls() -> None:
    async with running(saying(f"{CALL}\n{NOW}"), args=HERMES, max_model_len=512) as server:
        (choice,) = await both(server, parallel_tool_calls=False)
        assert choice["calls"] == [["weather", ARGUMENTS]] and choice["finish_reason"] == "tool_calls"


async def test_a_call_that_was_cut_is_not_called_complete() -> None:
    async with running(saying(CALL), args=HERMES, max_model_len=512) as server:
        (choice,) = await both(server, max_tokens=60)
        ((name, arguments),) = choice["calls"]
        assert name == "weather" and ARGUMENTS.startswith(arguments) and choice["finish_reason"] == "length"


async def test_a_stop_string_cuts_and_loses_nothing() -> None:
    async with running(saying(f"Let me see. {CALL}"), args=HERMES, max_model_len=512) as server:
        for stop, content, calls, reason in (
            ("me", "Let ", [], "stop"),
            ('"days', "Let me see.", [["weather", ARGUMENTS.partition('"days')[0]]], "stop"),
            ("</tool", "Let me see.", [["weather", ARGUMENTS]], "tool_calls"),
            ('", "arg', 'Let me see. <tool_call>\n{"name": "weather', [], "stop"),
        ):  # fmt: skip
            (choice,) = await both(server, stop=[stop])
            assert (choice["content"], choice["calls"], choice["finish_reason"]) == (content, calls, reason), stop


async def test_none_leaves_everything_alone() -> None:
    async with running(saying(CALL), args=HERMES, max_model_len=512) as server:
        (choice,) = await both(server, tool_choice="none")
        assert choice == {"content": CALL, "calls": [], "finish_reason": "stop"}
        (choice,) = await both(server, tools=None)
        assert choice["content"] == CALL, "without tools there are no calls"


async def test_reasoning() -> None:
    text = f"<think>\nHm, {{x}}.\n</think>\n\nI see. {CALL}"
    async with running(saying(text), args=THINKING, max_model_len=512) as server:
        (choice,) = await both(server)
        assert choice["reasoning"] == "Hm, {x}." and choice["content"] == "I see." and len(choice["calls"]) == 1
        (choice,) = await both(server, include_reasoning=False)
        assert "reasoning" not in choice and choice["content"] == "I see."
        answer = (await server.post(PATH, messages=HI, max_tokens=10)).json()
        assert read_plain(answer)[0]["content"] is None and answer["choices"][0]["finish_reason"] == "length"


class Thinker(ToyTokenizer):
    """Its template opens the thinking, and its marks tell what the model writes."""

    chat_template = ToyTokenizer.chat_template.replace("assistant\n{%", "assistant\n<think>\n{%")
    chat_template += "{# </think> <tool_call> #}"


async def test_the_template_opens_the_thinking() -> None:
    async with running(saying(f"Hm.</think>\n{NOW}"), tokenizer=Thinker(), max_model_len=512) as server:
        (choice,) = await both(server, thinking_token_budget=3)
        assert choice["reasoning"] == "Hm." and choice["calls"] == [["now", "{}"]] and choice["content"] is None
        thinking = server.engine.requests[-1].thinking
        assert thinking is not None and (thinking.begin, thinking.budget) == ([], 3)
        await both(server, tool_choice="required")
        assert '"THOUGHT' not in (grammar := str(server.engine.requests[-1].grammar)) and "THOUGHT" in grammar


async def test_logprobs_and_token_ids_come_once_each() -> None:
    """Also for tokens whose text is held back."""
    async with running(saying(f"Let me see. {CALL}"), args=HERMES, max_model_len=512) as server:
        body: dict[str, Any] = {"messages": HI, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
        plain = (await server.post(PATH, **body)).json()["choices"][0]
        tokens, entries = [], []
        text = (await server.post(PATH, **body, stream=True)).text
        for line in filter(None, text.split("\n\n")[:-2]):
            choice = json.loads(line[6:])["choices"][0]
            tokens += choice.get("token_ids") or []
            entries += (choice["logprobs"] or {"content": []})["content"]
        assert tokens == plain["token_ids"] and entries == plain["logprobs"]["content"]


async def test_structured_outputs_reach_the_engine() -> None:
    async with running(saying("x"), max_model_len=512) as server:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}}
        for body in (
            {"response_format": {"type": "json_object"}}, {"structured_outputs": {"json": schema}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        ):  # fmt: skip
            for path, prompt in ((PATH, {"messages": HI}), ("/v1/completions", {"prompt": "hi"})):
                answer = await server.post(path, **prompt, **body)
                request = server.engine.requests[-1]
                assert answer.status_code == 200 and "json_schema" in str(request.grammar), answer.text
                assert request.params.structured_outputs is None, "the engine gets it once"
        assert [call[0] for call in server.engine.calls].count("use_tokenizer") == 1


async def test_beams_follow_no_grammar() -> None:
    async with running(saying("x"), max_model_len=512) as server:
        body = {"messages": HI, "use_beam_search": True, "response_format": {"type": "json_object"}}
        answer = await server.post(PATH, **body)
        check_error(answer.status_code, answer.content, 400, "use_beam_search")


def test_parsers_are_checked_at_start() -> None:
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ParameterError, match="must be one of auto, none"):
            ServerArgs(**{name: "nonsense"})  # type: ignore[arg-type]
