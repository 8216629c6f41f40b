"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.messages import normalise
from enginecore.frontend.outputs import CompletionOutput, RequestOutput
from enginecore.request import SamplingParams
from enginecore.server.body import check_fields, checked, convert, read_object
from enginecore.server.generation import (
    Job,
    encode,
    json_response,
    new_job,
    prepare_all,
    run_to_end,
    stream_events,
    usage_suffix,
)
from enginecore.server.logprobs import chat_logprobs, prompt_logprobs
from enginecore.server.protocol import UNSUPPORTED_CHAT, ChatRequest, field_names
from enginecore.server.sampling import chat_params, num_rows
from enginecore.server.sse import event, unless_gone
from enginecore.server.state import ServerState
from enginecore.server.usage import usage_of

_KNOWN = field_names(ChatRequest)


async def chat_completions(state: ServerState, request: Request) -> Response | ASGIApp:
    request_id: str = request.state.request_id
    raw = await read_object(request)
    body, params, asked, tools = await checked(request, functools.partial(_check, state, raw, request_id))
    with state.reserve(num_rows(params)) as submitted:
        prepare = functools.partial(_prepare, state, body, params, tools, clamp=not asked)
        prompts = await unless_gone(request, prepare_all(state, [prepare]))
        job = new_job(state, body, params, prompts, "chatcmpl", request_id)
        if not body.stream:
            (output,) = await run_to_end(request, job, submitted)
            return json_response(_answer(job, output))
        writer = _Writer(job)
        return await stream_events(request, job, writer, writer.usage_head, submitted)


def _check(
    state: ServerState, raw: dict[str, Any], request_id: str
) -> tuple[ChatRequest, SamplingParams, bool, list[dict[str, Any]] | None]:
    """(body, parameters, whether the client asked for max_tokens itself, tools to show)."""
    check_fields(raw, _KNOWN, UNSUPPORTED_CHAT, strict=state.args.strict_fields, request_id=request_id)
    body = convert(raw, ChatRequest)
    state.check_model(body.model)
    params, asked = chat_params(body, state.llm.defaults, state.llm.config.max_logprobs)
    return body, params, asked, check_tools(body)


def check_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools to show to the template: none with tool_choice "none". Calls that must happen are not there yet."""
    for index, tool in enumerate(body.tools or []):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ParameterError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}', param=f"tools[{index}]"
            )
    kind = (body.response_format or {}).get("type", "text" if body.response_format is None else None)
    if kind != "text":
        raise ParameterError(
            f"response_format {str(kind)[:64]!r} is not supported yet; only text is",
            param="response_format",
            code="unsupported_parameter",
        )
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None if choice == "none" else body.tools or None
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "function"):
        raise ParameterError(
            'tool_choice "required" or a named function is not supported yet; use "auto" or "none"',
            param="tool_choice",
            code="unsupported_parameter",
        )
    raise ParameterError('tool_choice must be "none" or "auto"', param="tool_choice")


def _prepare(
    state: ServerState, body: ChatRequest, params: SamplingParams, tools: list[dict[str, Any]] | None, *, clamp: bool
) -> PreparedRequest:
    """Render, tokenise and check; runs in a thread."""
    if body.messages is None:
        raise ParameterError("messages is missing", param="messages")
    generation_prompt = body.add_generation_prompt
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    text = state.llm.renderer.render(
        body.messages,
        tools=tools,
        add_generation_prompt=not body.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs,
    )
    return state.llm.input.process(
        text,
        params,
        priority=body.priority,
        cache_salt=body.cache_salt,
        add_special_tokens=bool(body.add_special_tokens),
        clamp=clamp,
        param="messages",
    )


def _echoed(body: ChatRequest) -> str:
    """With echo, a final assistant message is repeated in front of its continuation."""
    if not body.echo:
        return ""
    (final,) = normalise(body.messages[-1:])
    return str(final["content"]) if final["role"] == "assistant" else ""


def _logprobs(job: Job, output: CompletionOutput) -> dict[str, Any] | None:
    body = job.body
    assert isinstance(body, ChatRequest)
    if not body.logprobs:
        return None
    return chat_logprobs(
        job.state.llm.table, output, body.top_logprobs or 0, job.params, as_ids=body.return_tokens_as_token_ids
    )


def _answer(job: Job, output: RequestOutput) -> dict[str, Any]:
    body = job.body
    assert isinstance(body, ChatRequest)
    echoed = _echoed(body)
    choices = []
    for choice in output.outputs:
        entry = {
            "index": choice.index,
            "message": {"role": "assistant", "content": echoed + choice.text, "refusal": None},
            "logprobs": _logprobs(job, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.return_token_ids:
            entry["token_ids"] = choice.token_ids
        choices.append(entry)
    answer = {
        "id": job.answer_id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.state.model_name,
        "system_fingerprint": job.state.fingerprint["id"],
        "choices": choices,
        "usage": usage_of([output]),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return answer


class _Writer:
    """Chunks of a chat stream. The parts that never change are encoded once."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.body, ChatRequest)
        self._job = job
        self._suffix = usage_suffix(job)
        self._wants_logprobs = job.body.logprobs
        self._wants_ids = job.body.return_token_ids
        self._echoed = _echoed(job.body)
        self._started: set[int] = set()
        head = {
            "id": job.answer_id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.state.model_name,
            "system_fingerprint": job.state.fingerprint["id"],
        }
        start = encode(head)[:-1]
        self._head = b"data: " + start + b',"choices":[{"index":'
        self.usage_head = start + b',"choices":[],"usage":'

    def chunks(self, key: int, output: RequestOutput) -> bytes:
        suffix = self._suffix(output)
        return b"".join(self._choice(output, choice, suffix) for choice in output.outputs)

    def _choice(self, output: RequestOutput, choice: CompletionOutput, suffix: bytes) -> bytes:
        start = b"" if choice.index in self._started else self._start(output, choice.index, suffix)
        if not choice.text and choice.finish_reason is None and not (self._wants_logprobs or self._wants_ids):
            return start  # a character or a possible stop string is still being held back
        end = b"null"
        if choice.finish_reason is not None:
            end = encode(choice.finish_reason) + b',"stop_reason":' + encode(choice.stop_reason)
        if self._wants_ids:
            end += b',"token_ids":' + encode(choice.token_ids)
        logprobs = encode(_logprobs(self._job, choice)) if self._wants_logprobs else b"null"
        return b"".join(
            (
                start, self._head, b"%d" % choice.index, b',"delta":{"content":', encode(choice.text),
                b'},"logprobs":', logprobs, b',"finish_reason":', end, b"}]", suffix, b"\n\n",
            )
        )  # fmt: skip

    def _start(self, output: RequestOutput, index: int, suffix: bytes) -> bytes:
        """The chunk that opens a choice: its role and, with echo, the text that it continues."""
        self._started.add(index)
        delta = encode({"role": "assistant", "content": self._echoed})
        extra = b""
        if self._wants_ids:
            extra = b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        chunk = self._head[6:] + b'%d,"delta":%b,"logprobs":null,"finish_reason":null}]' % (index, delta)
        return event(chunk + extra + suffix)
