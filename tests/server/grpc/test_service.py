"""What the methods do: the same as the HTTP routes, in other words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from enginecore.server.args import ServerArgs
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.logprobs import FLOOR
from google.protobuf.json_format import ParseDict

from tests.server.fake_engine import saying
from tests.server.grpc.wire import Wire, wired

#: Fields of the same name and meaning in both.
SAMPLING: dict[str, Any] = {
    "n": 2, "max_tokens": 7, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
    "presence_penalty": 0.25, "frequency_penalty": -0.25, "repetition_penalty": 1.25, "seed": 5, "stop": ["zzz"],
    "stop_token_ids": [7], "bad_words": ["ab"], "include_stop_str_in_output": True, "ignore_eos": True,
    "skip_special_tokens": False, "logit_bias": {"5": -1.5}, "allowed_token_ids": [5, 6], "logprobs": 2,
    "truncate_prompt_tokens": 3, "skip_reading_prefix_cache": True,
}  # fmt: skip
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2, "max_tokens": 3, "length_penalty": 0.5}


async def sent(wire: Wire, http: dict[str, Any], rpc: pb.GenerateRequest, path: str) -> list[Any]:
    """What the engine is asked for by one and the other, ids and times aside."""
    answer = await wire.http.http.post(path, json=http)
    assert answer.status_code == 200, answer.text
    over_http = wire.http.engine.requests[:]
    wire.http.engine.requests.clear()
    await wire.stub.Generate(rpc)
    both = [over_http, wire.http.engine.requests[:]]
    wire.http.engine.requests.clear()
    return [[msgspec.structs.replace(r, request_id="", arrival_time=0.0, fork_of=bool(r.fork_of)) for r in each]
            for each in both]  # fmt: skip


async def test_the_engine_is_asked_for_the_same_as_over_http() -> None:
    overrides = {"temperature": 0.75, "top_k": 3}
    async with wired(args=ServerArgs(override_generation_config=overrides)) as wire:
        for fields in (SAMPLING, BEAMS, {}, {"best_of": 3, "n": 2}, {"max_tokens": 1, "prompt_logprobs": 1}):
            request = ParseDict({"text": "hello world", "sampling": fields, "cache_salt": "s"}, pb.GenerateRequest())
            http = {"prompt": "hello world", "cache_salt": "s", **fields}
            one, other = await sent(wire, http, request, "/v1/completions")
            assert one == other and one, fields
        ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))
        one, other = await sent(wire, {"prompt": [5, 6, 7]}, ids, "/v1/completions")
        assert one == other and one[0].params.top_k == 3
        chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user", content="hi")]))
        messages = [{"role": "user", "content": "hi"}]
        one, other = await sent(wire, {"messages": messages}, chat, "/v1/chat/completions")
        assert one == other and one[0].max_tokens > 16
        assert set(SAMPLING) | set(BEAMS) | {"best_of", "prompt_logprobs"} == {
            field.name for field in pb.Sampling.DESCRIPTOR.fields
        }, "every field of the definition is tried"


@pytest.mark.parametrize(
    ("structure", "http"),
    [
        ({"json": '{"type": "object"}'}, {"json": {"type": "object"}}),
        ({"regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"choice": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_object": True}, {"json_object": True}),
        ({"json": "{}", "whitespace_pattern": " ?"}, {"json": {}, "whitespace_pattern": " ?"}),
    ],
)
async def test_structured_outputs(structure: dict[str, Any], http: dict[str, Any]) -> None:
    async with wired() as wire:
        request = ParseDict({"text": "x", "structured_outputs": structure}, pb.GenerateRequest())
        one, other = await sent(wire, {"prompt": "x", "structured_outputs": http}, request, "/v1/completions")
        assert one == other and one[0].grammar


async def test_an_answer_and_its_stream() -> None:
    async with wired(saying("hello world"), served_model_name="toy") as wire:
        wire.http.engine.cached = 2
        sampling = pb.Sampling(logprobs=1, n=2)
        request = pb.GenerateRequest(model="toy", text="ab hello", sampling=sampling)
        whole = await wire.stub.Generate(request, metadata=(("x-request-id", "mine"),))
        parts = [part async for part in wire.stub.GenerateStream(request)]
        assert whole.request_id == "mine" and whole.model == "toy" and parts
        assert [choice.text for choice in whole.choices] == ["hello world"] * 2
        first = whole.choices[0]
        assert first.finish_reason == pb.FINISH_REASON_STOP and first.WhichOneof("stop_reason") is None
        assert len(first.logprobs) == len(first.token_ids) == 3 and first.logprobs[0].chosen.token == b"hello"
        assert first.logprobs[0].top[0].rank == 1 and first.logprobs[0].chosen.rank == 2
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.cached_tokens) == (2, 6, 2)
        assert not any(part.HasField("usage") for part in parts[:-1]) and parts[-1].usage == whole.usage
        for choice in whole.choices:
            mine = [news for part in parts for news in part.choices if news.index == choice.index]
            assert "".join(news.text for news in mine) == choice.text
            assert [token for news in mine for token in news.token_ids] == list(choice.token_ids)
            assert [entry for news in mine for entry in news.logprobs] == list(choice.logprobs)
            assert [news.finish_reason for news in mine if news.finish_reason] == [choice.finish_reason]


async def test_what_ended_it_and_the_prompts_logprobs() -> None:
    async with wired(saying("hello world")) as wire:
        sampling = pb.Sampling(stop=["wor"], prompt_logprobs=3)
        answer = await wire.stub.Generate(pb.GenerateRequest(text="ab hello", sampling=sampling))
        assert answer.choices[0].text == "hello " and answer.choices[0].stop_string == "wor"
        head, second = answer.prompt_logprobs
        assert not head.HasField("chosen") and second.chosen.logprob == -1.5
        assert second.top[-1].logprob == FLOOR, "no infinities"
        sampling = pb.Sampling(stop_token_ids=[256])
        answer = await wire.stub.Generate(pb.GenerateRequest(text="ab", sampling=sampling))
        assert wire.http.engine.requests[-1].params.stop_token_ids == [256] and answer.choices[0].token_ids


async def test_tokens() -> None:
    async with wired() as wire:
        text = await wire.stub.Tokenize(pb.TokenizeRequest(text="hello world"))
        http = (await wire.http.post("/tokenize", prompt="hello world")).json()
        assert list(text.token_ids) == http["tokens"] and text.max_model_len == http["max_model_len"]
        message = [pb.Message(role="user", content="hi")]
        for chat, body in (
            (pb.Chat(messages=message), {}),
            (pb.Chat(messages=message, add_generation_prompt=False), {"add_generation_prompt": False}),
        ):
            mine = await wire.stub.Tokenize(pb.TokenizeRequest(chat=chat))
            http = (await wire.http.post("/tokenize", messages=[{"role": "user", "content": "hi"}], **body)).json()
            assert list(mine.token_ids) == http["tokens"]
        back = await wire.stub.Detokenize(pb.DetokenizeRequest(token_ids=text.token_ids))
        assert back.text == "hello world"


def test_the_definition_takes_json_as_the_docs_show_it() -> None:
    shown = json.loads('{"text": "Hello", "sampling": {"max_tokens": 16, "logit_bias": {"5": -100}}}')
    assert ParseDict(shown, pb.GenerateRequest()).sampling.logit_bias[5] == -100
