"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginecore.adapters import AdapterKey
from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.messages import normalise
from enginecore.frontend.outputs import CompletionOutput, RequestOutput
from enginecore.frontend.tools.answer import PlannedAnswer
from enginecore.frontend.tools.plan import Plan, make_plan
from enginecore.request import SamplingParams
from enginecore.server.body import check_fields, checked, convert, read_object
from enginecore.server.chat_parts import ChoiceDeltas, message_of
from enginecore.server.generation import (
    Job,
    choose_adapter,
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
    body, params, asked, plan = await checked(request, functools.partial(_check, state, raw, request_id))
    adapter = choose_adapter(state, request, body.model)
    with state.reserve(num_rows(params)) as submitted:
        prepare = functools.partial(_prepare, state, body, params, plan, clamp=not asked, adapter=adapter)
        prompts = await unless_gone(request, prepare_all(state, [prepare]))
        job = new_job(state, body, params, prompts, "chatcmpl", request_id, plan)
        if not body.stream:
            (output,) = await run_to_end(request, job, submitted)
            return json_response(_answer(job, output))
        writer = _Writer(job)
        return await stream_events(request, job, writer, writer.usage_head, submitted)


def _check(state: ServerState, raw: dict[str, Any], request_id: str) -> tuple[ChatRequest, SamplingParams, bool, Plan]:
    """(body, parameters, whether the client asked for max_tokens itself, the form of the answer)."""
    check_fields(raw, _KNOWN, UNSUPPORTED_CHAT, strict=state.args.strict_fields, request_id=request_id)
    body = convert(raw, ChatRequest)
    state.adapter_of(body.model)
    params, asked = chat_params(body, state.llm.defaults, state.llm.config.max_logprobs)
    return body, params, asked, plan_of(state, body, params)


def plan_of(state: ServerState, body: ChatRequest, params: SamplingParams) -> Plan:
    """What the request says about the form of its answer. ParameterError names the field."""
    return make_plan(
        state.dialect,
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        response_format=body.response_format,
        structured_outputs=params.structured_outputs,
        thinking_budget=body.thinking_token_budget,
    )


def _prepare(
    state: ServerState, body: ChatRequest, params: SamplingParams, plan: Plan, *, clamp: bool,
    adapter: AdapterKey | None,
) -> PreparedRequest:  # fmt: skip
    """Render, tokenise and check; runs in a thread."""
    if body.messages is None:
        raise ParameterError("messages is missing", param="messages")
    generation_prompt = body.add_generation_prompt
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    text = state.llm.renderer.render(
        body.messages,
        tools=plan.shown_tools,
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
        form=plan.form(text, state.llm.input.grammars),
        adapter=adapter,
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


def _planned(job: Job) -> PlannedAnswer:
    body = job.body
    assert isinstance(body, ChatRequest) and job.plan is not None
    return PlannedAnswer(job.plan, job.prompts[0].form, with_reasoning=body.include_reasoning)


def _message(job: Job, choice: CompletionOutput, echoed: str) -> tuple[dict[str, Any], str | None]:
    """(the message of a whole choice, its finish_reason)."""
    if job.plan is None or job.plan.plain:
        text = {"role": "assistant", "content": echoed + choice.text, "refusal": None}
        return text, choice.finish_reason
    answer = _planned(job)
    return message_of(answer.feed(choice), answer, echoed), answer.finish_reason


def _answer(job: Job, output: RequestOutput) -> dict[str, Any]:
    body = job.body
    assert isinstance(body, ChatRequest)
    echoed = _echoed(body)
    choices = []
    for choice in output.outputs:
        message, finish_reason = _message(job, choice, echoed)
        entry = {
            "index": choice.index,
            "message": message,
            "logprobs": _logprobs(job, choice),
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.return_token_ids:
            entry["token_ids"] = choice.token_ids
        choices.append(entry)
    answer = {
        "id": job.answer_id,
        "object": "chat.completion",
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.fingerprint_id,
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
        self._deltas: dict[int, ChoiceDeltas] = {}
        head = {
            "id": job.answer_id,
            "object": "chat.completion.chunk",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": job.fingerprint_id,
        }
        start = encode(head)[:-1]
        self._head = b"data: " + start + b',"choices":[{"index":'
        self.usage_head = start + b',"choices":[],"usage":'

    def chunks(self, key: int, output: RequestOutput) -> bytes:
        suffix = self._suffix(output)
        return b"".join(self._choice(output, choice, suffix) for choice in output.outputs)

    def _choice(self, output: RequestOutput, choice: CompletionOutput, suffix: bytes) -> bytes:
        start = b"" if choice.index in self._started else self._start(output, choice.index, suffix)
        if self._job.plan is not None and not self._job.plan.plain:
            return start + self._planned_choice(choice, suffix)
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

    def _planned_choice(self, choice: CompletionOutput, suffix: bytes) -> bytes:
        """A chunk for each delta; what goes with the step's tokens is in the first, the finish in one of its own."""
        deltas = self._deltas.get(choice.index)
        if deltas is None:
            deltas = self._deltas[choice.index] = ChoiceDeltas(_planned(self._job))
        bodies = deltas.take(choice)
        if choice.finish_reason is not None or (not bodies and (self._wants_logprobs or self._wants_ids)):
            bodies.append({})
        chunks = []
        for number, delta in enumerate(bodies):
            logprobs = encode(_logprobs(self._job, choice)) if self._wants_logprobs and not number else b"null"
            end = b"null"
            if choice.finish_reason is not None and number == len(bodies) - 1:
                end = encode(deltas.finish_reason) + b',"stop_reason":' + encode(choice.stop_reason)
            if self._wants_ids and not number:
                end += b',"token_ids":' + encode(choice.token_ids)
            chunks += [
                self._head, b"%d" % choice.index, b',"delta":', encode(delta), b',"logprobs":', logprobs,
                b',"finish_reason":', end, b"}]", suffix, b"\n\n",
            ]  # fmt: skip
        return b"".join(chunks)

    def _start(self, output: RequestOutput, index: int, suffix: bytes) -> bytes:
        """The chunk that opens a choice: its role and, with echo, the text that it continues."""
        self._started.add(index)
        only_calls = self._job.plan is not None and self._job.plan.choice.mode == "required"
        delta = encode({"role": "assistant", "content": None if only_calls else self._echoed})
        extra = b""
        if self._wants_ids:
            extra = b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        chunk = self._head[6:] + b'%d,"delta":%b,"logprobs":null,"finish_reason":null}]' % (index, delta)
        return event(chunk + extra + suffix)
