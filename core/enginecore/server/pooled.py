"""What the pooling routes do alike: read a body, run texts in waves, count them, write numbers.

A request may hold thousands of texts. They go to the engine a wave at a time, so that one client's pile neither fills
the queue nor keeps another's single text waiting until all of it is done.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import Prompt
from enginecore.frontend.pooling import FloatArray, PoolingInput, PoolingOutput, PreparedPooling
from enginecore.server.body import check_fields, checked, convert, read_object
from enginecore.server.errors import JSON
from enginecore.server.generation import encode
from enginecore.server.keys import Tally
from enginecore.server.protocol import field_names
from enginecore.server.sse import unless_gone
from enginecore.server.state import ServerState

S = TypeVar("S", bound=msgspec.Struct)

#: Texts of one request: OpenAI's limit.
MAX_INPUTS = 2048
#: Texts of one request that are in the engine at a time.
WAVE = 256
#: Numbers in one answer: vectors of every token add up.
MAX_NUMBERS = 2**24


async def read_body(
    state: ServerState, request: Request, schema: type[S], unsupported: dict[str, tuple[Any, ...]]
) -> S:
    """The body as `schema`, for the model that is served. Raises ParameterError and ApiError."""
    raw = await read_object(request)

    def check() -> S:
        strict, request_id = state.args.strict_fields, request.state.request_id
        check_fields(raw, field_names(schema), unsupported, strict=strict, request_id=request_id)
        body = convert(raw, schema)
        state.check_model(getattr(body, "model", None))
        return body

    return await checked(request, check)


def pooling_input(state: ServerState) -> PoolingInput:
    """What checks texts. The application has seen to it that the model is one for pooling."""
    processor = state.llm.input
    assert isinstance(processor, PoolingInput)
    return processor


def split_inputs(value: Any, field: str = "input") -> list[tuple[Prompt, str]]:
    """The texts of a request with their names in errors: text, texts, token ids or lists of token ids."""
    if value is None:
        raise ParameterError(f"{field} is missing", param=field)
    if isinstance(value, str):
        return [(value, field)]
    if not isinstance(value, list):
        raise ParameterError(f"{field} must be a string, a list of strings, or token ids", param=field)
    if not value:
        raise ParameterError(f"{field} must not be empty", param=field)
    if not isinstance(value[0], (str, list)):
        return [(value, field)]
    check_count(len(value), field)
    kind = type(value[0])
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise ParameterError(f"{field} must not mix strings and token ids", param=f"{field}[{index}]")
    return [(item, f"{field}[{index}]") for index, item in enumerate(value)]


def check_count(count: int, field: str) -> None:
    """A bound on the texts of one request."""
    if count > MAX_INPUTS:
        raise ParameterError(
            f"{field} may hold at most {MAX_INPUTS} texts, got {count}; send several requests", param=field
        )


async def run_pooling(
    state: ServerState, request: Request, prepare: Callable[[], Sequence[PreparedPooling]], count: int
) -> list[PoolingOutput]:
    """The outputs of the texts that `prepare`, which runs in a thread, gives. There are `count` of them at most. The
    client's hanging up aborts them."""
    return await unless_gone(request, pool_texts(state, request.state.tally, request.state.request_id, prepare, count))


async def pool_texts(
    state: ServerState, tally: Tally, request_id: str, prepare: Callable[[], Sequence[PreparedPooling]], count: int
) -> list[PoolingOutput]:
    """As `run_pooling`, for a client of any kind: being cancelled aborts what runs."""
    outputs: list[PoolingOutput] = []
    with state.reserve(min(count, WAVE)) as submitted:
        texts = await state.llm.off_loop(prepare)
        for start in range(0, len(texts), WAVE):
            wave: Any = texts[start : start + WAVE]
            found: dict[int, Any] = {}
            stream = state.llm.stream(wave, request_id=request_id, kind="final", submitted=submitted)
            async with contextlib.aclosing(stream):
                async for news in stream:
                    found.update(news)
            for key in range(len(wave)):
                tally.update(start + key, found[key])
                outputs.append(found[key])
    return outputs


def check_numbers(count: int) -> None:
    """A bound on the size of an answer."""
    if count > MAX_NUMBERS:
        raise ParameterError(
            f"the answer would have {count} numbers, at most {MAX_NUMBERS} may be; send fewer texts", param="input"
        )


def numbers(data: FloatArray, encoding_format: str) -> Any:
    """A vector or a list of vectors as JSON has it: nested lists, or base64 of little-endian float32, row by row."""
    if encoding_format == "base64":
        return base64.b64encode(data.astype("<f4", copy=False).tobytes()).decode()
    return data.tolist()


def usage(outputs: Sequence[PoolingOutput]) -> dict[str, int]:
    """The `usage` object: nothing is generated."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def head(state: ServerState, request: Request, prefix: str) -> dict[str, Any]:
    """The members that all answers begin with."""
    return {
        "id": f"{prefix}-{request.state.request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": state.model_name,
    }


async def answer(state: ServerState, build: Callable[[], dict[str, Any]]) -> Response:
    """A 200 with what `build` returns. Thousands of vectors take a while to write: in a thread."""
    return Response(await state.llm.off_loop(lambda: encode(build())), media_type=JSON)
