"""POST /v1/completions."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import PreparedRequest, Prompt
from enginecore.frontend.outputs import CompletionOutput, RequestOutput
from enginecore.request import SamplingParams
from enginecore.server.body import check_fields, checked, convert, read_object
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
from enginecore.server.logprobs import CompletionLogprobs, prompt_logprobs, prompt_pieces
from enginecore.server.protocol import UNSUPPORTED_COMPLETION, CompletionRequest, field_names
from enginecore.server.sampling import completion_params, num_rows
from enginecore.server.sse import unless_gone
from enginecore.server.state import ServerState, check_prompt_count
from enginecore.server.usage import usage_of

_KNOWN = field_names(CompletionRequest)


async def completions(state: ServerState, request: Request) -> Response | ASGIApp:
    request_id: str = request.state.request_id
    raw = await read_object(request)
    body, params, asked, prompts = await checked(request, functools.partial(_check, state, raw, request_id))
    adapter = choose_adapter(state, request, body.model)
    with state.reserve(len(prompts) * num_rows(params)) as submitted:
        process = functools.partial(
            state.llm.input.process,
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens is not False,
            clamp=not asked,
            adapter=adapter,
        )
        prepare = [functools.partial(process, prompt, param=name) for prompt, name in prompts]
        prepared = await unless_gone(request, prepare_all(state, prepare))
        job = new_job(state, body, params, prepared, "cmpl", request_id)
        if not body.stream:
            outputs = await run_to_end(request, job, submitted)
            return json_response(_answer(job, outputs))
        writer = _Writer(job)
        return await stream_events(request, job, writer, writer.usage_head, submitted)


def _check(
    state: ServerState, raw: dict[str, Any], request_id: str
) -> tuple[CompletionRequest, SamplingParams, bool, list[tuple[Prompt, str]]]:
    """(body, parameters, whether the client asked for max_tokens itself, prompts with their names)."""
    check_fields(raw, _KNOWN, UNSUPPORTED_COMPLETION, strict=state.args.strict_fields, request_id=request_id)
    body = convert(raw, CompletionRequest)
    state.adapter_of(body.model)
    params, asked = completion_params(body, state.llm.defaults)
    return body, params, asked, split_prompts(body.prompt)


def split_prompts(prompt: Any) -> list[tuple[Prompt, str]]:
    """The prompts of a request with their names in errors: text, texts, token ids or lists of token ids."""
    if prompt is None:
        raise ParameterError("prompt is missing", param="prompt")
    if isinstance(prompt, str):
        return [(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise ParameterError("prompt must be a string, a list of strings, or token ids", param="prompt")
    if not prompt:
        raise ParameterError("prompt must not be empty", param="prompt")
    if not isinstance(prompt[0], (str, list)):
        return [(prompt, "prompt")]
    check_prompt_count(len(prompt))
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            raise ParameterError("prompt must not mix strings and token ids", param=f"prompt[{index}]")
    return [(item, f"prompt[{index}]") for index, item in enumerate(prompt)]


class _Choices:
    """What choices of one prompt have in common, with echo and without."""

    def __init__(self, job: Job, key: int) -> None:
        body = job.body
        assert isinstance(body, CompletionRequest)
        self._job, self._body = job, body
        self._request: PreparedRequest = job.prompts[key]
        self.first_index = key * job.params.n
        self._table = job.state.llm.table
        self._builders: dict[int, CompletionLogprobs] = {}
        self._pieces = prompt_pieces(self._table, self._request) if body.echo else None

    def echo(self) -> str:
        return "".join(self._pieces) if self._pieces is not None else ""

    def logprobs(self, output: CompletionOutput, parent: RequestOutput, *, first: bool) -> dict[str, Any] | None:
        """The logprobs object of an output; with echo, the first one of a choice has the prompt in front."""
        top = self._body.logprobs
        if top is None:
            return None
        builder = self._builders.get(output.index)
        if builder is None:
            builder = CompletionLogprobs(self._table, top, as_ids=self._body.return_tokens_as_token_ids)
            self._builders[output.index] = builder
        prompt = None
        if first and self._pieces is not None:
            prompt = (parent.prompt_token_ids, self._pieces, parent.prompt_logprobs or [None] * len(self._pieces))
        return builder.build(output, prompt)


def _answer(job: Job, outputs: list[RequestOutput]) -> dict[str, Any]:
    body = job.body
    choices = []
    for key, output in enumerate(outputs):
        shared = _Choices(job, key)
        for choice in output.outputs:
            entry = {
                "index": shared.first_index + choice.index,
                "text": shared.echo() + choice.text,
                "logprobs": shared.logprobs(choice, output, first=True),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if body.prompt_logprobs is not None:
                entry["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
            if body.return_token_ids:
                entry["token_ids"] = choice.token_ids
                entry["prompt_token_ids"] = output.prompt_token_ids
            choices.append(entry)
    return {
        "id": job.answer_id,
        "object": "text_completion",
        "created": job.created,
        "model": job.model,
        "system_fingerprint": job.fingerprint_id,
        "choices": choices,
        "usage": usage_of(outputs),
    }


class _Writer:
    """Chunks of a completions stream. The parts that never change are encoded once."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.body, CompletionRequest)
        self._body = job.body
        self._suffix = usage_suffix(job)
        self._shared = [_Choices(job, key) for key in range(len(job.prompts))]
        self._started: set[int] = set()
        self._waiting: dict[int, RequestOutput] = {}
        head = {
            "id": job.answer_id,
            "object": "text_completion",
            "created": job.created,
            "model": job.model,
            "system_fingerprint": job.fingerprint_id,
        }
        start = encode(head)[:-1]
        self._head = b"data: " + start + b',"choices":[{"index":'
        self.usage_head = start + b',"choices":[],"usage":'

    def chunks(self, key: int, output: RequestOutput) -> bytes:
        output = self._with_prompt_logprobs(key, output)
        suffix = self._suffix(output)
        return b"".join(self._choice(key, output, choice, suffix) for choice in output.outputs)

    def _with_prompt_logprobs(self, key: int, output: RequestOutput) -> RequestOutput:
        """With echo and logprobs, choices wait until the prompt's log-probabilities, computed with choice 0, are
        there."""
        if not self._body.echo or self._body.logprobs is None:
            return output
        known = self._waiting.get(key)
        if known is None:
            self._waiting[key] = output
        elif known.prompt_logprobs is None:
            known.merge(output)
        else:
            output.prompt_logprobs = known.prompt_logprobs
            return output
        held = self._waiting[key]
        if held.prompt_logprobs is None:
            return RequestOutput(held.request_id, held.prompt, held.prompt_token_ids, [], held.finished)
        return held

    def _choice(self, key: int, output: RequestOutput, choice: CompletionOutput, suffix: bytes) -> bytes:
        shared, index = self._shared[key], self._shared[key].first_index + choice.index
        first = index not in self._started
        self._started.add(index)
        text = shared.echo() + choice.text if first else choice.text
        always = self._body.logprobs is not None or self._body.return_token_ids
        if not text and choice.finish_reason is None and not always:
            return b""
        logprobs = shared.logprobs(choice, output, first=first)
        end = b"null"
        if choice.finish_reason is not None:
            end = encode(choice.finish_reason) + b',"stop_reason":' + encode(choice.stop_reason)
        if self._body.return_token_ids:
            end += b',"token_ids":' + encode(choice.token_ids)
            if first:
                end += b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        return b"".join(
            (
                self._head, b"%d" % index, b',"text":', encode(text), b',"logprobs":', encode(logprobs),
                b',"finish_reason":', end, b"}]", suffix, b"\n\n",
            )
        )  # fmt: skip
