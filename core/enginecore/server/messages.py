"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.tools.answer import PlannedAnswer
from enginecore.server.body import check_fields, checked, convert, read_object
from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.messages_convert import (
    TTL_SECONDS,
    Breakpoint,
    Conversation,
    convert_conversation,
    convert_settings,
    convert_tools,
    is_prefill,
)
from enginecore.server.messages_protocol import (
    KNOWN_COUNT,
    KNOWN_MESSAGES,
    UNSUPPORTED,
    CountTokensRequest,
    MessagesRequest,
)
from enginecore.server.messages_write import Answer, BlockEvents, Cached, named_event
from enginecore.server.sse import EventStream, unless_gone
from enginecore.server.state import ServerState
from enginecore.server.turn import (
    Turn,
    check_turn,
    extra_fields,
    open_stream,
    outputs,
    prepare_turn,
    render_turn,
    whole_output,
)

logger = logging.getLogger("enginecore.server")

_MARK = "\ue0f6\ue0f7\ue0f6"


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    turn: Turn
    chat: Conversation
    prompt: PreparedRequest
    cached: Cached


async def messages(state: ServerState, request: Request) -> Response | ASGIApp:
    raw = await read_object(request)
    turn, chat = await checked(request, functools.partial(_check, state, raw, request))
    with state.reserve(1) as submitted:
        job = await unless_gone(request, state.llm.off_loop(_prepare, turn, chat))
        if not turn.body.stream:
            output = await whole_output(request, turn, job.prompt, submitted)
            parser = turn.parser(job.prompt)
            answer = _answer(job, parser)
            answer.take(output, parser.feed(output.outputs[0]))
            return json_response(answer.body())
        return await _stream(request, job, submitted)


def _check(state: ServerState, raw: dict[str, Any], request: Request) -> tuple[Turn, Conversation]:
    request_id = request.state.request_id
    check_fields(raw, KNOWN_MESSAGES, UNSUPPORTED, strict=state.args.strict_fields, request_id=request_id)
    return _turn(state, convert(raw, MessagesRequest), raw, request)


def _turn(
    state: ServerState, body: CountTokensRequest, raw: dict[str, Any], request: Request
) -> tuple[Turn, Conversation]:
    state.adapter_of(body.model)
    chat = convert_conversation(body)
    fields = extra_fields(raw) | convert_tools(body) | convert_settings(body)
    fields |= {"messages": chat.messages, "continue_final_message": is_prefill(chat)}
    return check_turn(state, request, fields, body.model), chat


def _prepare(turn: Turn, chat: Conversation) -> _Job:
    """Render, tokenise and check; runs in a thread. More max_tokens than the context has are cut, and said so when the
    answer gets there: clients ask for the most that any model has."""
    prompt = prepare_turn(turn, clamp=True, param="messages")
    if chat.breakpoint is None:
        return _Job(turn, chat, prompt, Cached())
    tokens = _tokens_before(turn, chat.breakpoint, prompt)
    if tokens:
        prompt = dataclasses.replace(prompt, pin_prefix=(tokens, float(TTL_SECONDS[chat.breakpoint.ttl])))
    return _Job(turn, chat, prompt, Cached(asked=True, tokens=tokens, ttl=chat.breakpoint.ttl))


def _tokens_before(turn: Turn, point: Breakpoint, prompt: PreparedRequest) -> int:
    """How many of the prompt's tokens stand before a cache_control, whole blocks of the cache only.

    The conversation is rendered once more with a mark at that place; what the two have in front in common counts.
    """
    marked = [dict(message) for message in turn.body.messages]
    content = marked[point.index]["content"]
    marked[point.index]["content"] = content[: point.chars] + _MARK + content[point.chars :]
    head, found, _ = render_turn(turn, marked).partition(_MARK)
    if not found:
        return 0
    llm = turn.state.llm
    ids = llm.tokenizer.encode(head, add_special_tokens=bool(turn.body.add_special_tokens))
    same = 0
    for ours, theirs in zip(ids, prompt.token_ids, strict=False):
        if ours != theirs:
            break
        same += 1
    return same - same % llm.config.block_size


def _answer(job: _Job, parser: PlannedAnswer) -> Answer:
    return Answer(f"msg_{job.turn.request_id}", job.turn.model, job.prompt, job.cached, parser.call_id)


async def _stream(request: Request, job: _Job, submitted: Callable[[], None]) -> EventStream:
    parser = job.turn.parser(job.prompt)
    answer, events = _answer(job, parser), BlockEvents(parser.call_id)

    async def generate() -> AsyncGenerator[bytes, None]:
        stream = outputs(job.turn, job.prompt, submitted, whole=False)
        started = False
        async with contextlib.aclosing(stream):
            async for output in stream:
                pieces = [piece for choice in output.outputs for piece in parser.feed(choice)]
                answer.take(output, pieces)
                news = b"".join(map(events.piece, pieces))
                if not started:
                    started = True
                    news = named_event("message_start", {"message": answer.start()}) + news
                if news:
                    yield news
        yield events.close() + named_event("message_delta", answer.delta()) + named_event("message_stop", {})

    def end(error: ApiError | None) -> bytes:
        return b"" if error is None else b"event: error\ndata: " + error.anthropic_body(job.turn.request_id) + b"\n\n"

    return await open_stream(request, generate(), end)


async def count_tokens(state: ServerState, request: Request) -> Response:
    """How many tokens the prompt of such a request has: what `usage` of its answer adds up to."""
    raw = await read_object(request)

    def count() -> int:
        request_id = request.state.request_id
        check_fields(raw, KNOWN_COUNT, UNSUPPORTED, strict=state.args.strict_fields, request_id=request_id)
        turn, _ = _turn(state, convert(raw, CountTokensRequest), {}, request)
        return len(state.llm.tokenizer.encode(render_turn(turn), add_special_tokens=False))

    return json_response({"input_tokens": await unless_gone(request, state.llm.off_loop(count))})
