"""POST /v1/embeddings, /classify and /pooling: what a pooling model makes of each text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore.frontend.pooling import PoolingOutput, PreparedPooling
from enginecore.pooling import PoolingParams
from enginecore.server.body import checked
from enginecore.server.pooled import (
    answer,
    check_numbers,
    head,
    numbers,
    pooling_input,
    read_body,
    run_pooling,
    split_inputs,
    usage,
)
from enginecore.server.pooling_protocol import (
    UNSUPPORTED_POOLING,
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
)
from enginecore.server.state import ServerState


async def embeddings(state: ServerState, request: Request) -> Response:
    """A vector of each text."""
    body = await read_body(state, request, EmbeddingRequest, UNSUPPORTED_POOLING)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
    outputs = await _run(state, request, body, params)

    def build() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": numbers(output.data, body.encoding_format)}
            for index, output in enumerate(outputs)
        ]
        return {**head(state, request, "embd"), "data": data, "usage": usage(outputs)}

    return await answer(state, build)


async def classify(state: ServerState, request: Request) -> Response:
    """The labels of each text, with their probabilities."""
    body = await read_body(state, request, ClassifyRequest, UNSUPPORTED_POOLING)
    outputs = await _run(state, request, body, PoolingParams(task="classify", activate=body.use_activation))
    labels = pooling_input(state).model.labels

    def build() -> dict[str, Any]:
        data = [
            {
                "index": index,
                "label": labels[int(output.data.argmax())],
                "probs": output.data.tolist(),
                "num_classes": len(output.data),
            }
            for index, output in enumerate(outputs)
        ]
        return {**head(state, request, "classify"), "data": data, "usage": usage(outputs)}

    return await answer(state, build)


async def pooling(state: ServerState, request: Request) -> Response:
    """The numbers of any task: vectors of the tokens, of the text, or classes."""
    body = await read_body(state, request, PoolingRequest, UNSUPPORTED_POOLING)
    tasks = pooling_input(state).model.tasks
    task = body.task or ("token_embed" if "token_embed" in tasks else "classify")
    params = PoolingParams(
        task=task, dimensions=body.dimensions, normalize=body.normalize, activate=body.use_activation
    )
    outputs = await _run(state, request, body, params)

    def build() -> dict[str, Any]:
        data = [
            {"index": index, "object": "pooling", "data": numbers(output.data, body.encoding_format)}
            for index, output in enumerate(outputs)
        ]
        return {**head(state, request, "pool"), "data": data, "usage": usage(outputs)}

    return await answer(state, build)


async def _run(
    state: ServerState, request: Request, body: EmbeddingRequest | ClassifyRequest, params: PoolingParams
) -> Sequence[PoolingOutput]:
    """Check every text, then run them all."""
    processor = pooling_input(state)
    processor.model.check(params)
    inputs = await checked(request, functools.partial(split_inputs, body.input))

    def prepare() -> list[PreparedPooling]:
        texts = [
            processor.prepare(
                prompt,
                params,
                truncate=body.truncate_prompt_tokens,
                add_special_tokens=body.add_special_tokens is not False,
                priority=body.priority,
                param=name,
            )
            for prompt, name in inputs
        ]
        rows = sum(len(text.token_ids) for text in texts) if params.task == "token_embed" else len(texts)
        check_numbers(rows * max(processor.model.dimensions, len(processor.model.labels)))
        return texts

    return await run_pooling(state, request, prepare, len(inputs))
