"""POST /v1/responses: OpenAI's Responses API. What is kept afterwards is in `responses_store`, its routes in
`responses_kept`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.outputs import RequestOutput
from enginecore.server.body import check_fields, checked, convert, read_object
from enginecore.server.errors import ApiError, as_api_error
from enginecore.server.generation import json_response
from enginecore.server.keys import Client
from enginecore.server.logprobs import chat_logprobs
from enginecore.server.responses_convert import convert_settings, convert_tools, input_items, new_id, to_messages
from enginecore.server.responses_protocol import KNOWN_RESPONSES, UNSUPPORTED, ResponsesRequest
from enginecore.server.responses_store import Stored
from enginecore.server.responses_write import ResponseWriter, response_object
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
)

logger = logging.getLogger("enginecore.server")

_PLAIN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    turn: Turn
    body: ResponsesRequest
    #: The conversation so far, the new input included.
    items: list[dict[str, Any]]
    owner: str


def owner_of(request: Request) -> str:
    """The name of the key that a request came with: its responses are its own."""
    client: Client = request.state.client
    return client.name


async def create(state: ServerState, request: Request) -> Response | ASGIApp:
    raw = await read_object(request)
    job = await checked(request, functools.partial(_check, state, raw, request))
    with contextlib.ExitStack() as room:
        submitted = room.enter_context(state.reserve(1))
        prompt = await unless_gone(request, state.llm.off_loop(_prepare, job))
        run = _Run(job, prompt, submitted)
        if job.body.background:
            room.enter_context(request.state.client.hold())
            stored = run.start_background(room.pop_all())
            if job.body.stream:
                return await open_stream(request, stored.follow(-1), lambda error: b"")
            return json_response(stored.response)
        if job.body.stream:
            return await run.stream(request)
        return json_response(await unless_gone(request, run.to_end()))


def _check(state: ServerState, raw: dict[str, Any], request: Request) -> _Job:
    request_id, owner = request.state.request_id, owner_of(request)
    check_fields(raw, KNOWN_RESPONSES, UNSUPPORTED, strict=state.args.strict_fields, request_id=request_id)
    body = convert(raw, ResponsesRequest)
    state.adapter_of(body.model)
    if body.background and not body.store:
        raise ParameterError("a response in the background must be stored", param="store")
    items = input_items(body.input)
    if body.previous_response_id is not None:
        param = "previous_response_id"
        earlier = state.responses.get(body.previous_response_id, owner, param)
        if not earlier.ended:
            raise ParameterError("the previous response has not ended", param=param)
        items = [*earlier.items, *earlier.response["output"], *items]
    settings = convert_settings(body)
    if "chat_template_kwargs" in settings:
        settings["chat_template_kwargs"] |= raw.get("chat_template_kwargs") or {}
    fields = extra_fields(raw) | convert_tools(body) | settings
    fields["messages"] = to_messages(items, body.instructions)
    return _Job(check_turn(state, request, fields, body.model), body, items, owner)


def _prepare(job: _Job) -> PreparedRequest:
    """Render, tokenise and check; runs in a thread."""
    try:
        return prepare_turn(job.turn, clamp=not job.turn.asked, param="input")
    except ParameterError as error:
        if error.param == "max_tokens":
            error.param = "max_output_tokens"
        if job.body.truncation != "auto" or error.code != "context_length_exceeded":
            raise
        return _prepare_truncated(job, error)


def _prepare_truncated(job: _Job, error: ParameterError) -> PreparedRequest:
    """With truncation auto, as few of the oldest messages as possible are left out; instructions and the last message
    stay. Found by bisection."""
    messages = job.turn.body.messages
    first = sum(1 for message in messages[:1] if job.body.instructions)
    least, most, found = 1, len(messages) - first - 1, None
    while least <= most:
        drop = (least + most) // 2
        kept = [*messages[:first], *messages[first + drop :]]
        turn = dataclasses.replace(job.turn, body=msgspec.structs.replace(job.turn.body, messages=kept))
        try:
            found = prepare_turn(turn, clamp=not turn.asked, param="input")
            most = drop - 1
        except ParameterError:
            least = drop + 1
    if found is None:
        raise error
    return found


def _response_id(state: ServerState, request_id: str) -> str:
    """After the request's id where that is a plain word of its own."""
    name = f"resp_{request_id}"
    return name if _PLAIN_ID.fullmatch(request_id) and name not in state.responses else new_id("resp")


class _Run:
    """One response on its way."""

    def __init__(self, job: _Job, prompt: PreparedRequest, submitted: Callable[[], None]) -> None:
        self._job, self._prompt, self._submitted = job, prompt, submitted
        self._state = job.turn.state
        response = response_object(job.turn, job.body, _response_id(self._state, job.turn.request_id))
        self._parser = job.turn.parser(prompt)
        self._writer = ResponseWriter(job.turn, response, self._parser.call_id)

    def _take(self, output: RequestOutput) -> bytes:
        body = self._job.turn.body
        news = []
        for choice in output.outputs:
            pieces = self._parser.feed(choice)
            logprobs: list[dict[str, Any]] = []
            if body.logprobs and all(piece.kind == "text" for piece in pieces):
                table, top = self._state.llm.table, body.top_logprobs or 0
                logprobs = chat_logprobs(table, choice, top, self._job.turn.params, as_ids=False)["content"]
            news.append(self._writer.take(output, pieces, logprobs))
        return b"".join(news)

    async def _events(self, *, whole: bool) -> AsyncGenerator[bytes, None]:
        """Groups of events, from the engine's first output on."""
        stream = outputs(self._job.turn, self._prompt, self._submitted, whole=whole)
        async with contextlib.aclosing(stream):
            async for output in stream:
                news = self._take(output)
                if news:
                    yield news
        yield self._writer.finish()

    def _keep(self) -> None:
        if self._job.body.store:
            self._state.responses.put(Stored(self._job.owner, self._writer.response, self._job.items))

    async def to_end(self) -> dict[str, Any]:
        self._writer.progress()
        async for _ in self._events(whole=not self._job.turn.body.logprobs):
            pass
        self._keep()
        return self._writer.response

    async def stream(self, request: Request) -> EventStream:
        async def generate() -> AsyncGenerator[bytes, None]:
            head = self._writer.start() + self._writer.progress()
            events = self._events(whole=False)
            async with contextlib.aclosing(events):
                async for news in events:
                    yield head + news
                    head = b""
            self._keep()

        return await open_stream(request, generate(), lambda error: b"" if error is None else self._writer.fail(error))

    # ---- in the background ---------------------------------------------------------------------------------------

    def start_background(self, room: contextlib.ExitStack) -> Stored:
        """Run without the client; `room` is the place in the queue that the run has taken."""
        stored = Stored(self._job.owner, self._writer.response, self._job.items, events=[])
        _append(stored, self._writer.start())
        self._state.responses.put(stored)
        self._state.in_flight += 1
        stored.task = asyncio.create_task(self._run_background(stored))
        # Not a `finally` of the task: one that is cancelled before its first step never gets there.
        stored.task.add_done_callback(lambda _: self._background_ended(stored, room))
        return stored

    async def _run_background(self, stored: Stored) -> None:
        try:
            _append(stored, self._writer.progress())
            events = self._events(whole=False)
            async with contextlib.aclosing(events):
                async for news in events:
                    _append(stored, news)
        except Exception as error:
            answer = as_api_error(error)
            if answer is None:
                logger.exception("a response in the background failed")
                answer = ApiError(500, "internal error")
            _append(stored, self._writer.fail(answer))

    def _background_ended(self, stored: Stored, room: contextlib.ExitStack) -> None:
        if not stored.ended:
            self._writer.cancel()
        room.close()
        self._state.in_flight -= 1
        stored.task = None
        if stored.response["id"] in self._state.responses:
            self._state.responses.put(stored)
        stored.notify()


def _append(stored: Stored, news: bytes) -> None:
    assert stored.events is not None
    stored.events += [event + b"\n\n" for event in news.split(b"\n\n")[:-1]]
    stored.notify()


async def input_tokens(state: ServerState, request: Request) -> Response:
    """How many tokens the prompt of such a request has."""
    raw = await read_object(request)

    def count() -> int:
        job = _check(state, raw, request)
        return len(state.llm.tokenizer.encode(render_turn(job.turn), add_special_tokens=False))

    tokens = await unless_gone(request, state.llm.off_loop(count))
    return json_response({"object": "response.input_tokens", "input_tokens": tokens})
