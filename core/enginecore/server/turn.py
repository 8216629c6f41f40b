"""One turn of the assistant, for the routes that speak of blocks or items instead of choices (messages, responses).

Their bodies are translated into a chat request, so that whatever a chat can do they can do too. Back comes a list of
pieces: reasoning, text, calls of functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from enginecore.adapters import AdapterKey
from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.outputs import RequestOutput
from enginecore.frontend.tools.answer import PlannedAnswer
from enginecore.frontend.tools.pieces import Piece as Piece  # for those who write turns
from enginecore.frontend.tools.plan import Plan
from enginecore.request import SamplingParams
from enginecore.server.body import convert
from enginecore.server.chat import plan_of
from enginecore.server.generation import choose_adapter
from enginecore.server.keys import Tally
from enginecore.server.protocol import ChatRequest
from enginecore.server.sampling import chat_params
from enginecore.server.sse import EventStream, StreamEnd, unless_gone
from enginecore.server.state import ServerState

#: Fields of a chat request that these routes take under the same name, beyond what their own API has.
EXTRA_FIELDS = (
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop_token_ids", "bad_words",
    "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "truncate_prompt_tokens",
    "logit_bias", "allowed_token_ids", "cache_salt", "skip_reading_prefix_cache", "priority", "chat_template_kwargs",
    "structured_outputs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """A checked request. `asked` says whether max_tokens is the client's own; `tally` counts its tokens."""

    state: ServerState
    request_id: str
    tally: Tally
    body: ChatRequest
    params: SamplingParams
    asked: bool
    plan: Plan
    adapter: AdapterKey | None = None

    @property
    def model(self) -> str:
        """The name that the answer gives as its model."""
        return self.state.model_name if self.adapter is None else self.adapter[0]

    def parser(self, prompt: PreparedRequest) -> PlannedAnswer:
        """What takes the answer to `prompt` apart."""
        return PlannedAnswer(self.plan, prompt.form)


def check_turn(state: ServerState, request: Request, chat: dict[str, Any], model: str | None = None) -> Turn:
    """The turn that a chat request's fields ask for, of `model`. ParameterError for what is wrong with them."""
    thought = state.dialect.reasoning
    if thought is None or (thought.layout == "harmony" and chat.get("thinking_token_budget") == 0):
        chat = {**chat, "thinking_token_budget": None}  # there is no thinking to bound
    body = convert({name: value for name, value in chat.items() if value is not None}, ChatRequest)
    params, asked = chat_params(body, state.llm.defaults, state.llm.config.max_logprobs)
    plan, adapter = plan_of(state, body, params), choose_adapter(state, request, model)
    turn = Turn(state, request.state.request_id, request.state.tally, body, params, asked, plan, adapter)
    turn.tally.asked(params, turn.model)
    return turn


def extra_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The members of a body that a chat request has under the same name."""
    return {name: raw[name] for name in EXTRA_FIELDS if name in raw}


def render_turn(turn: Turn, messages: list[dict[str, Any]] | None = None) -> str:
    """The prompt's text (of other messages where these are given). Slow: for a thread."""
    body = turn.body
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return turn.state.llm.renderer.render(
        body.messages if messages is None else messages,
        tools=turn.plan.shown_tools,
        add_generation_prompt=not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs,
    )


def prepare_turn(turn: Turn, *, clamp: bool, param: str) -> PreparedRequest:
    """Render, tokenise and check. `param` is what errors call the conversation. Slow: for a thread."""
    try:
        text = render_turn(turn)
    except ParameterError as error:
        if error.param == "messages":
            error.param = param
        raise
    return turn.state.llm.input.process(
        text,
        turn.params,
        priority=turn.body.priority,
        cache_salt=turn.body.cache_salt,
        add_special_tokens=bool(turn.body.add_special_tokens),
        clamp=clamp,
        param=param,
        form=turn.plan.form(text, turn.state.llm.input.grammars),
        adapter=turn.adapter,
    )


async def outputs(
    turn: Turn, prompt: PreparedRequest, submitted: Callable[[], None], *, whole: bool
) -> AsyncGenerator[RequestOutput, None]:
    """What the engine says: once when all is said, or bit by bit."""
    stream = turn.state.llm.stream(
        [prompt], request_id=turn.request_id, kind="final" if whole else "delta", submitted=submitted
    )
    async with contextlib.aclosing(stream):
        async for news in stream:
            for key, output in news:
                turn.tally.update(key, output)
                yield output


async def whole_output(
    request: Request, turn: Turn, prompt: PreparedRequest, submitted: Callable[[], None]
) -> RequestOutput:
    """The final output. The client's hanging up aborts it."""

    async def collect() -> RequestOutput:
        stream = outputs(turn, prompt, submitted, whole=True)
        async with contextlib.aclosing(stream):
            return await anext(stream)

    return await unless_gone(request, collect())


async def open_stream(request: Request, chunks: AsyncGenerator[bytes, None], end: StreamEnd) -> EventStream:
    """The response of a stream. It starts when the first chunk is there, so that a refusal is still a plain answer."""
    try:
        first = await unless_gone(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, end)
