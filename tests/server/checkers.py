"""Strict checkers of the HTTP API, for in-process tests and for those against a real server.

Each stream checker is a state machine over the events; it returns the stream put together again in the shape of the
plain answer, so that `same_answer` can compare the two.
"""

from __future__ import annotations

import json
from typing import Any

FINISH_REASONS = {"stop", "length"}
#: What a plain answer and a stream of the same request may differ in.
_VARYING = {"id", "created", "object"}


def strict_json(text: str | bytes) -> Any:
    """Parse JSON; NaN and Infinity are errors."""

    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, without the `[DONE]` that must end it."""
    assert text.endswith("\n\n"), "the last event is not finished"
    blocks = text[:-2].split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    data = [block.removeprefix("data: ") for block in blocks]
    assert data[-1] == "[DONE]" and "[DONE]" not in data[:-1]
    return [strict_json(each) for each in data[:-1]]


def check_error(status: int, body: str | bytes, want: int, param: str | None = None) -> dict[str, Any]:
    """The envelope, with nothing internal in it. Returns its inside."""
    assert status == want, (status, body[:500])
    answer = strict_json(body)
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
    error: dict[str, Any] = answer["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    for leak in ("Traceback", "object at 0x", 'File "', "/site-packages/"):
        assert leak not in error["message"], error
    if param is not None:
        assert error["param"] == param, error
    return error


def check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


def _check_common(answer: dict[str, Any], kind: str, prefix: str, n: int) -> None:
    assert answer["object"] == kind and answer["id"].startswith(prefix) and isinstance(answer["created"], int)
    assert [choice["index"] for choice in answer["choices"]] == list(range(n)), answer
    for choice in answer["choices"]:
        assert choice["finish_reason"] in FINISH_REASONS
    check_usage(answer["usage"])


def check_chat(answer: dict[str, Any], n: int = 1) -> dict[str, Any]:
    """A plain chat answer."""
    _check_common(answer, "chat.completion", "chatcmpl-", n)
    for choice in answer["choices"]:
        message = choice["message"]
        assert message["role"] == "assistant" and isinstance(message["content"], str)
        if choice["logprobs"] is not None:
            check_chat_logprobs(choice["logprobs"])
    return answer


def check_completion(answer: dict[str, Any], n: int = 1, *, echo: bool = False) -> dict[str, Any]:
    """A plain completions answer with n choices in all."""
    _check_common(answer, "text_completion", "cmpl-", n)
    for choice in answer["choices"]:
        assert isinstance(choice["text"], str)
        if choice["logprobs"] is not None:
            check_completion_logprobs(choice["logprobs"], choice, echo=echo)
    return answer


def check_chat_logprobs(logprobs: dict[str, Any]) -> None:
    for entry in logprobs["content"]:
        assert isinstance(entry["token"], str) and entry["logprob"] <= 0
        assert all(isinstance(byte, int) and 0 <= byte < 256 for byte in entry["bytes"])
        best = [each["logprob"] for each in entry["top_logprobs"]]
        assert best == sorted(best, reverse=True)


def check_completion_logprobs(logprobs: dict[str, Any], choice: dict[str, Any], *, echo: bool) -> None:
    columns = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    assert len({len(column) for column in columns}) == 1
    tokens, values, best, offsets = columns
    for index, (value, top) in enumerate(zip(values, best, strict=True)):
        if echo and index == 0:
            assert value is None and top is None
        else:
            assert value <= 0 and max(top.values()) >= value
    assert offsets == sorted(offsets)
    if not isinstance(choice.get("stop_reason"), str):  # a stop string cuts the text inside tokens
        assert "".join(tokens) == choice["text"]
        for offset, token in zip(offsets, tokens, strict=True):
            assert choice["text"][offset:].startswith(token)


def check_chat_stream(text: str, n: int = 1, *, usage: bool = False) -> dict[str, Any]:
    """Every choice: one chunk with the role first, deltas, exactly one finish. Then the usage chunk if it was asked
    for."""
    events = parse_events(text)
    choices: dict[int, dict[str, Any]] = {}
    final = _split_usage(events, usage)
    for event in events:
        assert event["object"] == "chat.completion.chunk" and event["id"] == events[0]["id"]
        (choice,) = event["choices"]
        index, delta = choice["index"], choice["delta"]
        if index not in choices:
            assert delta["role"] == "assistant", "the first chunk of a choice has its role"
            choices[index] = {
                "index": index, "message": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None,
                "finish_reason": None,
            }  # fmt: skip
        else:
            assert "role" not in delta
        known = choices[index]
        assert known["finish_reason"] is None, "a chunk after the finish"
        known["message"]["content"] += delta.get("content", "")
        _add_ids(known, choice)
        if choice["logprobs"] is not None:
            known["logprobs"] = known["logprobs"] or {"content": [], "refusal": None}
            known["logprobs"]["content"] += choice["logprobs"]["content"]
        _finish(known, choice)
    answer = _whole(events, choices, final, "chat.completion")
    return check_chat(answer, n) if usage else _finished(answer, n)


def check_completion_stream(text: str, n: int = 1, *, usage: bool = False, echo: bool = False) -> dict[str, Any]:
    """Like `check_chat_stream`, for /v1/completions."""
    events = parse_events(text)
    choices: dict[int, dict[str, Any]] = {}
    final = _split_usage(events, usage)
    for event in events:
        assert event["object"] == "text_completion" and event["id"] == events[0]["id"]
        (choice,) = event["choices"]
        known = choices.setdefault(
            choice["index"], {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": None}
        )
        assert known["finish_reason"] is None, "a chunk after the finish"
        known["text"] += choice["text"]
        _add_ids(known, choice)
        if choice["logprobs"] is not None:
            if known["logprobs"] is None:
                known["logprobs"] = {name: [] for name in choice["logprobs"]}
            for name, column in choice["logprobs"].items():
                known["logprobs"][name] += column
        _finish(known, choice)
    answer = _whole(events, choices, final, "text_completion")
    return check_completion(answer, n, echo=echo) if usage else _finished(answer, n)


def _split_usage(events: list[dict[str, Any]], wanted: bool) -> dict[str, Any] | None:
    final = None
    if wanted:
        last = events.pop()
        assert last["choices"] == [], "the usage chunk has no choices"
        final = last["usage"]
        check_usage(final)
        assert all("usage" in event for event in events)
    assert all(event.get("usage") is None for event in events)
    return final


def _add_ids(known: dict[str, Any], choice: dict[str, Any]) -> None:
    """With return_token_ids: those of the answer in every chunk, those of the prompt in the first one."""
    if "token_ids" in choice:
        known["token_ids"] = known.get("token_ids", []) + choice["token_ids"]
    if "prompt_token_ids" in choice:
        assert "prompt_token_ids" not in known
        known["prompt_token_ids"] = choice["prompt_token_ids"]


def _finish(known: dict[str, Any], choice: dict[str, Any]) -> None:
    if choice["finish_reason"] is not None:
        known["finish_reason"] = choice["finish_reason"]
        known["stop_reason"] = choice.get("stop_reason")


def _whole(
    events: list[dict[str, Any]], choices: dict[int, dict[str, Any]], usage: dict[str, Any] | None, kind: str
) -> dict[str, Any]:
    first = events[0]
    answer = {"id": first["id"], "object": kind, "created": first["created"], "model": first["model"]}
    answer["system_fingerprint"] = first["system_fingerprint"]
    answer["choices"] = [choices[index] for index in sorted(choices)]
    if "prompt_token_ids" in first:  # of a chat
        answer["prompt_token_ids"] = first["prompt_token_ids"]
    if usage is not None:
        answer["usage"] = usage
    return answer


def _finished(answer: dict[str, Any], n: int) -> dict[str, Any]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(n)), answer
    assert all(choice["finish_reason"] in FINISH_REASONS for choice in answer["choices"])
    return answer


def same_answer(stream: dict[str, Any], plain: dict[str, Any], *, cached: bool = False) -> None:
    """A stream put together equals the plain answer: text, logprobs, finish and usage (`cached` compares that too)."""
    left, right = ({k: v for k, v in each.items() if k not in _VARYING} for each in (stream, plain))
    if "usage" not in left:
        right.pop("usage")
    elif not cached:
        for each in (left, right):
            each["usage"] = {k: v for k, v in each["usage"].items() if k != "prompt_tokens_details"}
    assert left == right


def metric(exposition: str, name: str, **labels: str) -> float:
    """The value of one sample of /metrics; `name` without the prefix."""
    total, found = 0.0, False
    for line in exposition.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.split("{")[0] == f"enginecore:{name}" and all(f'{k}="{v}"' in sample for k, v in labels.items()):
            total, found = total + float(value), True
    assert found, f"no metric {name} {labels}"
    return total
