"""What /v1/completions and /v1/chat/completions do alike: run prepared prompts and wait for them or stream them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore.adapters import AdapterKey
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.outputs import RequestOutput
from enginecore.frontend.tools.plan import Plan
from enginecore.request import SamplingParams
from enginecore.server.errors import JSON
from enginecore.server.keys import Tally
from enginecore.server.protocol import SamplingFields
from enginecore.server.sse import EventStream, event, unless_gone
from enginecore.server.state import ServerState
from enginecore.server.usage import Usage

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: its prompts, ready to run, and how its answer is labelled."""

    state: ServerState
    body: SamplingFields
    params: SamplingParams
    prompts: Sequence[PreparedRequest]
    answer_id: str
    request_id: str
    created: int
    plan: Plan | None = None
    adapter: AdapterKey | None = None

    @property
    def model(self) -> str:
        """The name that the answer gives as its model."""
        return self.state.model_name if self.adapter is None else self.adapter[0]

    @property
    def fingerprint_id(self) -> str:
        return self.state.fingerprint_id(self.adapter)


class ChunkWriter(Protocol):
    """Turns news about a request into events."""

    def chunks(self, key: int, output: RequestOutput) -> bytes: ...


def new_job(
    state: ServerState, body: SamplingFields, params: SamplingParams, prompts: Sequence[PreparedRequest], prefix: str,
    request_id: str, plan: Plan | None = None,
) -> Job:  # fmt: skip
    """A job labelled with the client's request id and the time."""
    adapter = prompts[0].adapter if prompts else None
    return Job(state, body, params, prompts, f"{prefix}-{request_id}", request_id, int(time.time()), plan, adapter)


def choose_adapter(state: ServerState, request: Request, model: str | None) -> AdapterKey | None:
    """The adapter that a request's model names, None for the model itself; the answer's headers tell its
    fingerprint."""
    adapter = state.adapter_of(model)
    if adapter is not None:
        request.state.fingerprint = state.fingerprint_id(adapter)
    return adapter


async def prepare_all(state: ServerState, prepare: Sequence[Callable[[], PreparedRequest]]) -> list[PreparedRequest]:
    """Check and tokenise prompts in threads. A short list is one hop, a long one is spread out."""
    if len(prepare) == 1:
        return [await state.llm.off_loop(prepare[0])]
    size = -(-len(prepare) // 4)
    slices = [prepare[start : start + size] for start in range(0, len(prepare), size)]
    done = await asyncio.gather(*(state.llm.off_loop(lambda part: [each() for each in part], part) for part in slices))
    return [request for part in done for request in part]


async def run_to_end(request: Request, job: Job, submitted: Callable[[], None]) -> list[RequestOutput]:
    """The final outputs of all prompts, in order. The client's hanging up aborts them."""

    tally: Tally = request.state.tally
    tally.asked(job.params, job.model)

    async def collect() -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        stream = job.state.llm.stream(job.prompts, request_id=job.request_id, kind="final", submitted=submitted)
        async with contextlib.aclosing(stream):
            async for news in stream:
                outputs.update(news)
                for key, output in news:
                    tally.update(key, output)
        return [outputs[key] for key in range(len(job.prompts))]

    return await unless_gone(request, collect())


async def stream_events(
    request: Request, job: Job, writer: ChunkWriter, usage_head: bytes, submitted: Callable[[], None]
) -> EventStream:
    """The response of a stream. It starts when the first output is there, so that a refusal is still a plain answer.

    `usage_head` is the start of the last chunk, up to the value of `usage`.
    """
    options = job.body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    tally: Tally = request.state.tally
    tally.asked(job.params, job.model)

    async def generate() -> AsyncGenerator[bytes, None]:
        usage = Usage()
        stream = job.state.llm.stream(job.prompts, request_id=job.request_id, kind="delta", submitted=submitted)
        async with contextlib.aclosing(stream):
            async for news in stream:
                parts = []
                for key, output in news:
                    tally.update(key, output)
                    if include_usage:
                        usage.update(key, output)
                    parts.append(writer.chunks(key, output))
                chunk = b"".join(parts)
                if chunk:
                    yield chunk
        if include_usage:
            yield event(usage_head + encode(usage.body()) + b"}")

    chunks = generate()
    try:
        first = await unless_gone(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks)


def usage_suffix(job: Job) -> Callable[[RequestOutput], bytes]:
    """What ends a chunk: nothing, `"usage":null`, or with continuous_usage_stats the figures of the chunk's prompt
    so far."""
    options = job.body.stream_options
    if options is None or not options.include_usage:
        return lambda output: b"}"
    if not options.continuous_usage_stats:
        return lambda output: b',"usage":null}'

    def with_figures(output: RequestOutput) -> bytes:
        usage = Usage()
        usage.update(0, output)
        return b',"usage":' + encode(usage.body()) + b"}"

    return with_figures


def json_response(value: dict[str, Any]) -> Response:
    """A 200 with strict JSON."""
    return Response(encode(value), media_type=JSON)
